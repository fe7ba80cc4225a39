"""Installing torch_xla: refused by name."""

from anytrain.compat.accelerate import refused

__getattr__ = refused.of(__name__, "utils.torch_xla")
