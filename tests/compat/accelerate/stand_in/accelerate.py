"""Stand in for HF Accelerate: `import accelerate` gives anytrain's adapter room instead.

With this folder first on PYTHONPATH, a program written for HF Accelerate runs unmodified over
anytrain, its child processes too. `accelerate.test_utils` stays theirs, and sees our modules.
"""

import importlib
import pkgutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import anytrain.compat.accelerate as ours

_HERE = str(Path(__file__).parent)
_THEIRS = PathFinder.find_spec("accelerate", [p for p in sys.path if p and p != _HERE])

_FILES = [found.name for found in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}.")]
for _name in (*_FILES, *(f"{ours.__name__}.{name}" for name in ours.refused.WITHOUT_FILE)):
    if _name != f"{ours.__name__}.utils.rich":  # importing it changes tracebacks
        _alias = "accelerate" + _name.removeprefix(ours.__name__)
        sys.modules[_alias] = importlib.import_module(_name)

# What is not ours (test_utils, commands) is looked for in the installed package.
ours.__path__.extend(_THEIRS.submodule_search_locations)
sys.modules["accelerate"] = ours
