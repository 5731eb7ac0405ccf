"""Where events go: a log file, TensorBoard, wandb, a webhook."""
