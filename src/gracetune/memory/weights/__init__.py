"""Weights read from safetensors files straight into their final place, with one copy of them in memory."""
