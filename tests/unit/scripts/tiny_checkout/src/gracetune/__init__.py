"""What bootstrap.sh installs in the tests, in place of the real package."""


def main() -> None:
    import torch

    print("torch", torch.__version__)
