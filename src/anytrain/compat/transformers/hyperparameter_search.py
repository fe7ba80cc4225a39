"""Backends of HF's hyperparameter search: refused by name."""

from anytrain.compat.transformers import elsewhere

__getattr__ = elsewhere.of(__name__)
