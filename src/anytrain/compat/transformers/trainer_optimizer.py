"""The inside of HF's optimizer factory: refused by name."""

from anytrain.compat.transformers import other_names

__getattr__ = other_names.of(__name__)
