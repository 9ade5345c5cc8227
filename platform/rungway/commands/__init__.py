"""One file per command of the command line; `cli.py` lists them."""
