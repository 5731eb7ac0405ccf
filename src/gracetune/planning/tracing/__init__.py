"""Footprints measured on a model's code: what its blocks keep for the backward pass, without weights and without a GPU.

`trace` runs the real denoiser on the meta device and returns footprint blocks (`models.footprint`).
"""
