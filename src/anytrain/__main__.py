"""Make `python -m anytrain` the same as the `anytrain` command."""

from anytrain.cli.main import run

if __name__ == "__main__":
    run()
