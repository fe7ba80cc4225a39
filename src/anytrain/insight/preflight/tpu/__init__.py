"""Compile a training step for a TPU that is not here: its graph, its chip, their environments."""
