"""HF transformers' names over anytrain, so that a script changes its import lines alone.

`from transformers import Trainer` becomes `from anytrain.compat.transformers import Trainer`, and
`import transformers` becomes `import anytrain.compat.transformers as transformers`. The Trainer,
its arguments, callbacks and outputs are anytrain's; models, tokenizers, collators and every other
name come from transformers itself. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from anytrain.compat import modules
from anytrain.compat.transformers import other_names

_HOMES = {
    "trainer": "Trainer",
    "trainer_callback": "DefaultFlowCallback EarlyStoppingCallback PrinterCallback "
    "ProgressCallback TrainerCallback TrainerControl TrainerState",
    "trainer_pt_utils": "torch_distributed_zero_first",
    "trainer_seq2seq": "Seq2SeqTrainer",
    "trainer_utils": "EvalPrediction IntervalStrategy SchedulerType enable_full_determinism "
    "set_seed",
    "training_args": "TrainingArguments",
    "training_args_seq2seq": "Seq2SeqTrainingArguments",
}
_OURS = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = (*_HOMES, "hyperparameter_search", *other_names.WITHOUT_FILE)

modules.serve(__name__, other_names.WITHOUT_FILE, other_names.module_getattr, lends="transformers")


def __getattr__(name: str) -> Any:
    if name == "__all__":  # what `from ... import *` brings: all that transformers' own brings
        return sorted({*_OURS, *_MODULES, *import_module("transformers").__all__})
    if name.startswith("__") and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = _find(name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *_MODULES, *dir(import_module("transformers"))})


def _find(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _OURS:
        return getattr(import_module(f"{__name__}.{_OURS[name]}"), name)
    return getattr(import_module("transformers"), name)
