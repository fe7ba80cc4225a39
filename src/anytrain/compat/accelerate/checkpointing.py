"""HF's checkpoint functions: refused by name, in favour of `Accelerator.save_state`."""

from anytrain.compat.accelerate import refused

__getattr__ = refused.of(__name__, "checkpointing", neighbours=("logging", "state", "utils"))
