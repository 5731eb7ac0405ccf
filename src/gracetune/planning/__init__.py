"""What a run needs, where it would live, and whether it fits: pure functions, no torch, no GPU.

Reads what models, adapters and optimizers record about themselves, and the Machine.
"""
