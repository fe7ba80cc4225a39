"""The file of a launch."""

from anytrain.compat.accelerate.commands.config import config_args as config_args
from anytrain.compat.accelerate.commands.config.config_args import (
    default_config_file,
    load_config_from_file,
)

__all__ = ["default_config_file", "load_config_from_file"]
