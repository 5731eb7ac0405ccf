"""FLUX.1: image transformers with double-stream and single-stream blocks."""
