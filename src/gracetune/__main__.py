"""`python -m gracetune`: the command, also where its script is not on the path."""

from gracetune.cli.main import main

main()
