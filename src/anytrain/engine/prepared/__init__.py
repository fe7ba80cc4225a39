"""What `prepare` returns."""
