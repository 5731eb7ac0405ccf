"""Qwen-Image and Qwen-Image-Edit: double-stream image transformers with a vision-language text encoder."""
