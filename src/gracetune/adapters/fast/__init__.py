"""Factorised adapters on linear layers: computed from their factors, without materializing the change of the weight."""
