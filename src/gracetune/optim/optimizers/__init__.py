"""One file per optimizer, each with its `RECORD`; `config/registry.py` lists them. None imports torch at its top."""
