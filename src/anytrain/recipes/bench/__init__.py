"""Train the same job with anytrain and with its peers, side by side, and compare."""
