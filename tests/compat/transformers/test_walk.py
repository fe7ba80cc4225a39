"""Every public name of transformers 5.22's Trainer modules is offered here, or refused by name.

A name counts when HF's own source binds it at the top level of a module: by `def`, `class`, or an
assignment in capitals, and has no underscore in front. A class counts with its public members,
a function with its parameters, an enum with its members, a dataclass with its fields.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from anytrain.compat import transformers as ours_room
from anytrain.compat.modules import Refusal
from anytrain.compat.transformers import other_names
from anytrain.core.errors import Notice, Unsupported
from anytrain.doors.trainer.overrides import NEVER_CALLED

OURS = "anytrain.compat.transformers"
MODULES = [
    "hyperparameter_search",
    "trainer",
    "trainer_callback",
    "trainer_jit_checkpoint",
    "trainer_optimizer",
    "trainer_pt_utils",
    "trainer_seq2seq",
    "trainer_utils",
    "training_args",
    "training_args_seq2seq",
]

# Steps of a class body that HF's dataclass forgets to delete.
LEFTOVERS = ("default_optim", "is_torch_greater_or_equal_than_2_8")


def here(module: str) -> Any:
    return importlib.import_module(f"{OURS}.{module}")


def there(module: str) -> Any:
    return importlib.import_module(f"transformers.{module}")


def bound(module: str) -> Iterator[str]:
    """Give the public names that a module's own source binds and the module has."""
    source = Path(str(importlib.util.find_spec(f"transformers.{module}").origin)).read_text()
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            names = [name for name in targets if name.isupper()]
        yield from (name for name in names if not name.startswith("_"))


COUNTED = [(module, name) for module in MODULES for name in dict.fromkeys(bound(module))]


def kind_of(module: str, name: str) -> str:
    """Return how a name is offered: ours, passed or refused."""
    value = getattr(here(module), name)
    if isinstance(value, Refusal):
        return "refused"
    return "passed" if name in other_names.passed(module) else "ours"


def test_enough_is_walked() -> None:
    assert len(COUNTED) > 110
    assert ("trainer", "Trainer") in COUNTED
    assert ("trainer_utils", "EvalPrediction") in COUNTED


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_module_is_there(module: str) -> None:
    names = [name for home, name in COUNTED if home == module]
    assert not [name for name in names if not hasattr(here(module), name)]


def test_the_table_of_names_has_no_stale_entries() -> None:
    known = set(COUNTED)
    listed = {(home, name) for home in MODULES for name in other_names.passed(home)}
    listed |= {(home, name) for home in MODULES for name in other_names.refused(home)}
    private = {(home, name) for home, name in listed if name.startswith("_")}
    assert listed - private <= known
    assert not [(home, name) for home, name in private if not hasattr(there(home), name)]
    assert not [pair for pair in listed if kind_of(*pair) == "ours"]


def test_what_is_passed_on_is_theirs_and_the_rest_is_ours() -> None:
    for module, name in COUNTED:
        value, kind = getattr(here(module), name), kind_of(module, name)
        if kind == "passed":
            assert value is getattr(there(module), name)
        elif kind == "ours" and hasattr(value, "__module__"):
            assert str(value.__module__).startswith("anytrain"), name


@pytest.mark.parametrize("pair", [pair for pair in COUNTED if kind_of(*pair) == "refused"])
def test_a_refused_name_says_why_and_what_instead(pair: tuple[str, str]) -> None:
    value = getattr(here(pair[0]), pair[1])
    assert not isinstance(object(), value)
    with pytest.raises(Unsupported) as caught:
        value()
    assert pair[1] in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(inspect.unwrap(value)).parameters)
    except (TypeError, ValueError):
        return {}


def missing_parameters(theirs: Any, ours: Any) -> list[str]:
    """Return HF's parameters that ours would not take."""
    taken = parameters(ours)
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return []
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in parameters(theirs).items()
        if name not in taken and name not in ("self", "cls") and parameter.kind not in variadic
    ]


def differences(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Give what is below a name of theirs and not below ours."""
    if not callable(theirs):
        return
    yield from (f"{name}({lost}=)" for lost in missing_parameters(theirs, ours))
    if inspect.isclass(theirs):
        yield from member_differences(name, theirs, ours)


def member_differences(name: str, theirs: type, ours: Any) -> Iterator[str]:
    fields = {f.name for f in dataclasses.fields(ours)} if dataclasses.is_dataclass(ours) else ()
    if dataclasses.is_dataclass(theirs):
        yield from (f"{name}.{f.name}" for f in dataclasses.fields(theirs) if f.name not in fields)
    for member, value in vars(theirs).items():
        if member.startswith("_") or member in LEFTOVERS or member in fields:
            continue
        if not hasattr(ours, member):
            yield f"{name}.{member}"
        elif inspect.isfunction(function := getattr(value, "__func__", value)):
            lost = missing_parameters(function, getattr(ours, member))
            yield from (f"{name}.{member}({parameter}=)" for parameter in lost)


@pytest.mark.parametrize("module", MODULES)
def test_every_parameter_and_member_of_ours_is_there(module: str) -> None:
    lost: list[str] = []
    for name in (name for home, name in COUNTED if home == module):
        if kind_of(module, name) == "ours":
            lost += differences(name, getattr(there(module), name), getattr(here(module), name))
    assert not lost


def test_names_of_the_package_come_from_where_they_belong() -> None:
    homes = transformers._class_to_module
    for name, home in homes.items():
        if home in MODULES:
            assert getattr(ours_room, name) is getattr(here(home), name), name
    assert ours_room.AutoModel is transformers.AutoModel
    assert ours_room.default_data_collator is transformers.default_data_collator
    assert ours_room.HfArgumentParser is transformers.HfArgumentParser
    assert ours_room.__version__ == transformers.__version__
    assert not set(homes) - set(dir(ours_room))


def test_modules_are_theirs_unless_they_are_ours() -> None:
    from anytrain.compat.transformers.models.bert.modeling_bert import BertModel
    from anytrain.compat.transformers.utils import logging

    assert BertModel is transformers.BertModel
    assert logging is transformers.utils.logging
    assert ours_room.trainer_utils is here("trainer_utils")
    assert transformers.models.bert.__spec__.name == "transformers.models.bert"
    with pytest.raises(ModuleNotFoundError, match=f"{OURS}.nowhere"):
        importlib.import_module(f"{OURS}.nowhere")
    with pytest.raises(AttributeError, match="Nothing"):
        _ = ours_room.Nothing


# The inside of HF's optimizer factory and of its way onto a TPU.
INSIDE = ("IS_XLA_FSDPV2_POST_2_2", "OptimizerHandler")


def imported(module: str) -> Iterator[str]:
    """Give the names that a module of HF's has and does not bind itself."""
    own = {*INSIDE, *(name for home, name in COUNTED if home == module)}
    for name, value in vars(there(module)).items():
        is_inside = name.startswith("__") or (name.startswith("_") and name.isupper())
        is_theirs = getattr(value, "__module__", None) == f"transformers.{module}"
        if name not in own and not is_inside and not is_theirs:
            yield name


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_of_hfs_imports_can_be_imported_here(module: str) -> None:
    names = list(imported(module))
    assert "logger" in names
    assert not [name for name in names if not hasattr(here(module), name)]


@pytest.mark.parametrize("module", MODULES)
def test_what_is_imported_of_an_engine_is_ours(module: str) -> None:
    engine = {f"transformers.{home}" for home in MODULES}
    for name in imported(module):
        value = getattr(here(module), name, None)
        home = str(getattr(value, "__module__", ""))
        assert home.partition(".")[0] != "accelerate", name
        if home in engine:
            assert name in other_names.passed(home.partition(".")[2]), name


def test_names_are_found_where_public_packages_look_for_them() -> None:
    from anytrain.compat.transformers import trainer, trainer_callback, training_args

    assert trainer.Accelerator is importlib.import_module("anytrain.compat.accelerate").Accelerator
    assert trainer.PreTrainedModel is transformers.PreTrainedModel
    assert trainer.get_scheduler is transformers.get_scheduler
    assert trainer.logger is there("trainer").logger
    assert trainer_callback.IntervalStrategy is here("trainer_utils").IntervalStrategy
    assert trainer_callback.TrainingArguments is ours_room.TrainingArguments
    assert training_args.trainer_log_levels == there("training_args").trainer_log_levels
    assert training_args.log_levels == there("training_args").log_levels
    options = {"lr": "0.5", "deep": {"on": "true"}, "kind": "cosine"}
    assert training_args._convert_str_dict(options) is options
    assert options == {"lr": 0.5, "deep": {"on": True}, "kind": "cosine"}
    with pytest.raises(AttributeError, match="trainer' has no attribute 'no_such_name'"):
        _ = trainer.no_such_name


def test_hfs_trainer_is_never_imported_and_nothing_is_loaded_early() -> None:
    program = f"""
import sys
import {OURS} as transformers
assert "torch" not in sys.modules and "transformers" not in sys.modules
from {OURS} import AutoModel, Seq2SeqTrainer, Trainer, TrainingArguments, default_data_collator
from {OURS}.trainer import EvalPrediction, TRAINING_ARGS_NAME, get_last_checkpoint
from {OURS}.trainer import Accelerator, is_sagemaker_mp_enabled, logger, skip_first_batches
from {OURS}.training_args import DistributedType, trainer_log_levels
assert Trainer.__module__.startswith("anytrain")
assert not [m for m in ("transformers.trainer", "accelerate") if m in sys.modules]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=280)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _asked(tree: ast.Module) -> Iterator[str]:
    """Give the names of methods that a source asks objects for, but for those of `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Call):
            yield node.attr


def test_every_method_of_hfs_trainer_is_called_here_or_may_not_be_overridden() -> None:
    tree = ast.parse(Path(str(importlib.util.find_spec("transformers.trainer").origin)).read_text())
    (kind,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Trainer")
    methods = {n.name for n in kind.body if isinstance(n, ast.FunctionDef)}
    assert len(methods) > 80
    assert not [m for m in methods - NEVER_CALLED if not hasattr(ours_room.Trainer, m)]
    assert not NEVER_CALLED - methods
    # What neither calls is there to be called by scripts.
    doors = Path(str(importlib.util.find_spec("anytrain.doors").origin)).parent
    asked = {name for path in doors.rglob("*.py") for name in _asked(ast.parse(path.read_text()))}
    assert not (methods & set(_asked(tree))) - NEVER_CALLED - asked
    with pytest.raises(Unsupported, match="overrides _inner_training_loop, to no effect") as caught:

        class Idle(ours_room.Trainer):
            def _inner_training_loop(self) -> None: ...

    assert "training_step" in caught.value.fix


def test_questions_about_engines_that_are_not_here_are_answered(tmp_path: Path) -> None:
    args = ours_room.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        label_smoothing_factor=0.1,
        use_cpu=True,
    )
    trainer = ours_room.Trainer(Tiny(), args)
    assert trainer.get_total_train_batch_size(args) == 6
    assert trainer.get_sp_size() == trainer.get_cp_size() == trainer.get_tp_size() == 1
    assert not trainer.is_model_parallel
    assert not trainer.model_accepts_loss_kwargs
    assert trainer.place_model_on_device
    state = trainer.accelerator.gradient_state
    assert state.plugin_kwargs == {"num_steps": 1}  # the Trainer counts its batches itself
    with pytest.raises(Unsupported, match="get_batch_samples"):
        trainer.get_batch_samples(iter([]), 1, "cpu")


@pytest.mark.parametrize(
    "given", [{"num_train_epochs": 1.5}, {"max_steps": 7}, {"gradient_accumulation_steps": 3}]
)
@pytest.mark.parametrize("num", [12, 13])
def test_how_long_a_training_is_can_be_asked(
    tmp_path: Path, given: dict[str, Any], num: int
) -> None:
    from accelerate.state import AcceleratorState, GradientState

    data = [{"x": torch.ones(1)}] * num
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "use_cpu": True}
    found = []
    for room in (transformers, ours_room):
        args = room.TrainingArguments(report_to="none", **options, **given)
        trainer = room.Trainer(Tiny(), args, train_dataset=data)
        found.append(trainer.set_initial_training_values(args, trainer.get_train_dataloader()))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    assert found[0] == found[1]


def test_the_backends_of_a_search_are_known_by_name() -> None:
    search = here("hyperparameter_search")
    assert list(search.ALL_HYPERPARAMETER_SEARCH_BACKENDS) == list(search.HPSearchBackend)
    with pytest.raises(Unsupported, match="RayTuneBackend"):
        search.ALL_HYPERPARAMETER_SEARCH_BACKENDS["ray"]()


@pytest.mark.parametrize("shifted", [False, True])
def test_a_loss_of_ones_own_may_use_the_label_smoother(tmp_path: Path, shifted: bool) -> None:
    args = ours_room.TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.2, use_cpu=True
    )
    smoother = ours_room.Trainer(Tiny(), args).label_smoother
    theirs = their_smoother(0.2)
    torch.manual_seed(0)
    output = {"logits": torch.randn(2, 4, 5)}
    labels = torch.tensor([[1, 2, -100, 4], [0, 3, 2, -100]])
    for items in (None, 7):
        expected = theirs(output, labels, shift_labels=shifted, num_items_in_batch=items)
        found = smoother(output, labels, shift_labels=shifted, num_items_in_batch=items)
        assert torch.allclose(found, expected)


def their_smoother(epsilon: float) -> Any:
    return there("trainer_pt_utils").LabelSmoother(epsilon=epsilon)


def test_what_an_instance_of_hfs_trainer_has_ours_has(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState, GradientState

    options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    try:
        theirs = transformers.Trainer(Tiny(), transformers.TrainingArguments(**options))
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    ours = ours_room.Trainer(Tiny(), ours_room.TrainingArguments(**options))
    names = [name for name in vars(theirs) if not name.startswith("_")]
    assert len(names) > 20
    assert not [name for name in names if not hasattr(ours, name)]


def test_a_star_brings_what_transformers_own_brings() -> None:
    assert set(transformers.__all__) <= set(ours_room.__all__)
    assert {"Trainer", "TrainingArguments", "AutoTokenizer"} <= set(ours_room.__all__)


def test_a_function_put_into_a_module_of_hfs_is_named_at_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ours_room.TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none")
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 8

    class Own(ours_room.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **known: Any) -> Any:
            return model(inputs["x"]).sum()

    with monkeypatch.context() as patch:
        patch.setattr(ours_room.trainer, "speed_metrics", print)
        with pytest.warns(Notice, match=r"^transformers\.trainer\.speed_metrics was replaced"):
            Own(Tiny(), args, train_dataset=rows).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        Own(Tiny(), args, train_dataset=rows)._refuse_idle()
