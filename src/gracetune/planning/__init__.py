"""Memory estimates and plans: what a run needs, where it is placed, and whether it fits.

Pure functions that need neither torch nor a GPU. Their inputs are the records of models, adapters and optimizers, and a
`Machine`.
"""
