import tomllib
from pathlib import Path


def mapping_to_cli_args(mapping, *, transform=None, extras=None):
    return [f"--{key}={value}" for key, value in mapping.items() if not isinstance(value, dict)]


def load_toml_config():
    return mapping_to_cli_args(tomllib.loads(Path("config/config.toml").read_text()))
