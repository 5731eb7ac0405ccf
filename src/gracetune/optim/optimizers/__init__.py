"""One file per optimizer, each with its `RECORD`; `config/optimizers.py` lists them. None imports torch at its top."""
