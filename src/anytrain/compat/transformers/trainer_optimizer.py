"""The inside of HF's optimizer factory: refused by name."""

from anytrain.compat.transformers import elsewhere

__getattr__ = elsewhere.of(__name__)
