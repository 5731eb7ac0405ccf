"""Unified memory: the native shim, managed buffers, the overflow arena and its governor, placement and prefetch."""
