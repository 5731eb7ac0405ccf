"""Memory estimates and plans: what a run needs, where it is placed, and whether it fits.

Pure functions that need neither torch nor a GPU, except for `tracing` and the survey of the data. Their inputs are the
records of models, adapters and optimizers, and a `Machine`.
"""
