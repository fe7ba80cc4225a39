"""HF's saves at a signal, which anytrain makes by itself: refused by name."""

from anytrain.compat.transformers import elsewhere

__getattr__ = elsewhere.of(__name__)
