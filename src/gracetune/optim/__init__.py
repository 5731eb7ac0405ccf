"""Optimizers, learning-rate schedules, the batch ramp."""
