"""Which samples each rank sees, in which order."""
