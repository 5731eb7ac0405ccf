"""Sinks, which write events somewhere: a log file, TensorBoard, wandb, a webhook."""
