"""What trains: data, steps, checkpoints, and what `prepare` returns."""
