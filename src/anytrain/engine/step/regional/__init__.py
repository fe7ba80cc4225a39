"""The repeated block of a model, compiled beside the run and taken in if that repays."""
