"""Optimizers (one record each in `optimizers`), learning-rate schedules, the batch ramp."""
