"""HF's command line, as far as programs call it: launching a script, and its config file."""
