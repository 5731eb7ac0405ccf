"""Baselines: capture the cost of a short run, and compare two captures."""
