"""The file of a launch, as HF writes it, and where HF keeps its own.

`anytrain launch` reads the file that it is given with --config_file, and no other.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anytrain.core import documents, environment
from anytrain.core.errors import BadInput

__all__ = [
    "ClusterConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
]

_shared = environment.variable("XDG_CACHE_HOME") or "~/.cache"
hf_cache_home = os.path.expanduser(
    environment.variable("HF_HOME") or os.path.join(_shared, "huggingface")
)
cache_dir = os.path.join(hf_cache_home, "accelerate")
default_config_file = os.path.join(cache_dir, "default_config.yaml")
default_json_config_file = default_yaml_config_file = default_config_file


class ClusterConfig(SimpleNamespace):
    """What a config file says, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the names that say something, and what they say."""
        return {name: value for name, value in vars(self).items() if value not in (None, {})}


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> ClusterConfig:
    """Return what a YAML or JSON file of a launch says; without a name, HF's own file."""
    path = Path(default_config_file if config_file is None else config_file)
    if not path.is_file():
        raise FileNotFoundError(f"The config file {path} does not exist.")
    try:
        content = documents.from_yaml(path.read_text(encoding="utf-8"))  # JSON is YAML too
    except ValueError as error:
        raise BadInput(
            f"Cannot read the config file {path}.", why=f"{error}.", fix="correct the file."
        ) from None
    if not isinstance(content, dict):
        raise BadInput(
            f"Cannot read the config file {path}.",
            why="it must hold names and values, such as `num_processes: 2`.",
            fix="write one with `anytrain config --output my.yaml`.",
        )
    return ClusterConfig(**content)
