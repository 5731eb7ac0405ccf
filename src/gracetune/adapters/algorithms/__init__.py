"""The adapter algorithms: one record in one file each. `record.Algorithm` defines what a record holds.

To add one, write `<name>.py` here with a subclass of `Algorithm` and its only instance, `ALGORITHM`, and add a line to
`config.registry.ALGORITHMS`. Another package registers its record in the entry point group `gracetune.adapters`.
"""
