"""The adapter algorithms, one record in one file each (`record.Algorithm` says what a record holds).

To add one: write `<name>.py` here with a subclass of `Algorithm` and `ALGORITHM`, its only instance, and add its name
to `registry.OURS`. Another distribution names its module in the entry point group `gracetune.adapters` instead.
"""
