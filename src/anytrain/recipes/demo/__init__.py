"""A job that shows what anytrain does, in under a minute on two CPU cores."""
