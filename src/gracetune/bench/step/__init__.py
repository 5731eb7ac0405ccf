"""`gracetune bench wan14b|qwen|flux|sdxl`: the trainer's step on random weights, compared with a plain training
loop."""
