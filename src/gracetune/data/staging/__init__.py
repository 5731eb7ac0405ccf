"""Staging: copying a dataset's files into host memory before training."""
