"""Adapters on linear layers, computed without building the change of the weight."""
