import argparse
from pathlib import Path

from simpletuner.helpers.configuration import json_file, toml_file


def parse_cmdline_args(input_args=None, exit_on_error=False):
    parser = argparse.ArgumentParser()
    for name, kind, default in (
        ("output_dir", str, "output"),
        ("train_batch_size", int, 2),
        ("gradient_accumulation_steps", int, 1),
        ("max_train_steps", int, 0),
        ("num_train_epochs", int, 1),
        ("data_backend_config", str, "config/datasets.json"),
        ("dataloader_prefetch", str, ""),
        ("dataloader_prefetch_qlen", int, 10),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_args(input_args)


def load_env_config():
    return Path("config/config.env").read_text().split("\n")


helpers = {
    "json": json_file.load_json_config,
    "toml": toml_file.load_toml_config,
    "env": load_env_config,
    "cmd": parse_cmdline_args,
}


def load_config(args=None, exit_on_error=False):
    for kind in ("json", "toml", "env"):
        if Path(f"config/config.{kind}").is_file():
            return helpers["cmd"](input_args=helpers[kind](), exit_on_error=exit_on_error)
    return helpers["cmd"](exit_on_error=exit_on_error)
