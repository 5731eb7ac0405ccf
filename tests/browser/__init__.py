"""The studio in a real browser, on real runs of tiny models."""
