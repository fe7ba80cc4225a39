"""Reports of a run, made from its records alone."""
