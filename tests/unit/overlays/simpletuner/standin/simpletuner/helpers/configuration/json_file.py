import json
from pathlib import Path


def mapping_to_cli_args(mapping, *, transform=None, extras=None):
    return [f"--{key}={value}" for key, value in mapping.items() if not isinstance(value, dict)]


def load_json_config():
    return mapping_to_cli_args(json.loads(Path("config/config.json").read_text()), transform=None)
