"""Checkpoints: state parts, the atomic store, resuming. The files are described in `checkpoint.manifest`."""
