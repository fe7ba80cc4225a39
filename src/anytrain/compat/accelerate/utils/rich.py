"""HF's switch for coloured tracebacks: importing it turns rich's on."""

from rich.traceback import install

install(show_locals=False)
