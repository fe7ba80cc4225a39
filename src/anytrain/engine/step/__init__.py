"""One training step, and what keeps a bad one from doing harm."""
