"""gracetune's features inside a running SimpleTuner: `python -m gracetune_simpletuner TRAIN_PY [ARGUMENTS]`."""

__version__ = "0.1.0"
