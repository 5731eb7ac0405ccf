"""Wan 2.1 and 2.2: video diffusion transformers, the 2.2 14B ones with two noise experts."""
