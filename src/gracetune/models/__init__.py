"""Model families: one folder each, found through `registry`."""
