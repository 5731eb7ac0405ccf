"""Files on disk: atomic writes, locks, checksums, resumable transfers and safetensors files.

All durable writes of the package go through this folder.
"""
