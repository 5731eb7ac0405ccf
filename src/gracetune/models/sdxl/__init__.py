"""Stable Diffusion XL: an image U-Net."""
