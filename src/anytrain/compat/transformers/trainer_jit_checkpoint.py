"""HF's saves at a signal, which anytrain makes by itself: refused by name."""

from anytrain.compat.transformers import other_names

__getattr__ = other_names.of(__name__)
