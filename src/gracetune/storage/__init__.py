"""Files on disk: atomic writes, locks, and safetensors headers and writes. Only this folder does any of these."""
