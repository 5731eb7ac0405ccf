"""`gracetune bench wan14b|qwen|flux|sdxl`: the trainer's own step on random weights, against a plain loop beside it."""
