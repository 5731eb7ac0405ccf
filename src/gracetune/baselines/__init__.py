"""Baselines: capture what a short run costs, and compare two of them."""
