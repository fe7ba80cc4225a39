"""Several kinds of parallelism at once: refused by name."""

from anytrain.compat.accelerate import refused

__getattr__ = refused.of(__name__, "parallelism_config")
