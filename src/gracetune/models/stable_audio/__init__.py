"""Stable Audio Open: an audio diffusion transformer."""
