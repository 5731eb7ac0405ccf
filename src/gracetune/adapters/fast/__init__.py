"""Factorised adapters on linear layers: computed from their factors, without materialising the change of the weight."""
