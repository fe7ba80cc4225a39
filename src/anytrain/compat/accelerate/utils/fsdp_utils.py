"""Sharded models: refused by name."""

from anytrain.compat.accelerate import refused

__getattr__ = refused.of(__name__, "utils.fsdp_utils")
