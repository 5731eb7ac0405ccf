"""The files people already have, read into our own config: one folder for each program that writes them."""
