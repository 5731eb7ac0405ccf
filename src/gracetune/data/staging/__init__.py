"""Staging: a dataset's files are copied into host memory before training."""
