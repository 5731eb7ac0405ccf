"""Krea 2 (Raw and Turbo): single-stream image transformers that read several layers of a Qwen3-VL text encoder."""
