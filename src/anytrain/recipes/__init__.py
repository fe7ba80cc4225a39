"""Ready jobs: ordinary users of the doors."""
