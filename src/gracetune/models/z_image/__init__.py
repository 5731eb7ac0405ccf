"""Z-Image and Z-Image-Turbo: single-stream image transformers with a Qwen3 text encoder."""
