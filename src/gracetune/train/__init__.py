"""One training run, from a config to the trained weights: preflight, load, fit, finish (`run.train`)."""
