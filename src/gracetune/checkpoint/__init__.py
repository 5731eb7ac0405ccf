"""Checkpoints: state pieces, the atomic store, resuming. The files are described in `checkpoint.manifest`."""
