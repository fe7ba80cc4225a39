"""Every public name and parameter of HF Accelerate 1.15 works here, or is refused by name.

A name counts when HF's own source binds it at the top level of a module: by `def`, `class`, an
assignment in capitals, or (in the package and in `utils`) a relative import. Imported modules,
names of other libraries and names with an underscore do not count.

A class counts with its public members, a function or method with its parameters, an enum with
its members and a dataclass with its fields. A parameter is accepted by its name, or by
`**kwargs`. A refused name is a class without instances; calling it says what, why and how else.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest

from anytrain.compat.accelerate import refused
from anytrain.core.errors import Unsupported

OURS = "anytrain.compat.accelerate"
# Their command line and their tests are programs, not names for scripts.
NOT_WALKED = ("accelerate.commands", "accelerate.test_utils")
# Installs rich's tracebacks when it is imported, and raises here: it is an opt-in of HF's.
NO_NAMES = ("accelerate.utils.rich",)
# What HF's constructors put on an instance and ours decide elsewhere: `accelerator.plan` says it.
IN_THE_PLAN = ("dynamo_plugin",)
STATES = ("PartialState", "AcceleratorState", "GradientState")


def modules() -> list[str]:
    """Return HF's modules by name, without the package's own."""
    found = pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda name: None)
    names = [m.name for m in found if not m.name.startswith(NOT_WALKED) and m.name not in NO_NAMES]
    return ["accelerate", *names]


def bound(module: ModuleType) -> Iterator[str]:
    """Give the public names that a module's own source binds."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
    reexports = module.__name__ in ("accelerate", "accelerate.utils")
    for node in statements(tree.body):
        for name in names_of(node, reexports):
            if not name.startswith("_"):
                yield name


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from statements(getattr(node, inner, []))


def names_of(node: ast.stmt, reexports: bool) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
        return [name for name in targets if name.isupper()]
    if isinstance(node, ast.ImportFrom) and reexports and node.level:
        return [alias.asname or alias.name for alias in node.names]
    return []


def here(name: str) -> Any:
    """Return our module for one of theirs."""
    return importlib.import_module(OURS + name.removeprefix("accelerate"))


def counted() -> list[tuple[str, str]]:
    """Return every (module, name) that counts and that HF itself has in this environment."""
    pairs = []
    for module in map(importlib.import_module, modules()):
        for name in dict.fromkeys(bound(module)):
            if hasattr(module, name) and not isinstance(getattr(module, name), ModuleType):
                pairs.append((module.__name__, name))
    return pairs


COUNTED = counted()


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(inspect.unwrap(value)).parameters)
    except (TypeError, ValueError):
        return {}


def missing_parameters(theirs: Any, ours: Any) -> list[str]:
    """Return HF's parameters that ours would not take."""
    taken = parameters(ours)
    kinds = {p.kind for p in taken.values()}
    takes_any = {p for p, kind in VARIADIC.items() if kind in kinds}
    lost = []
    for name, parameter in parameters(theirs).items():
        if name in ("self", "cls") or name[0] == "_" or parameter.kind in VARIADIC.values():
            continue
        if name not in taken and "keyword" not in takes_any:
            lost.append(name)
    return lost


VARIADIC = {
    "positional": inspect.Parameter.VAR_POSITIONAL,
    "keyword": inspect.Parameter.VAR_KEYWORD,
}


def public_members(value: type) -> Iterator[tuple[str, Any]]:
    """Give a class's own public members, and its parents' within HF."""
    for kind in value.__mro__:
        if kind.__module__.startswith("accelerate"):
            yield from ((n, inspect.getattr_static(value, n)) for n in vars(kind) if n[0] != "_")


def differences(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Give the names below one that ours lacks."""
    if isinstance(ours, refused.Refusal):
        return
    if callable(theirs):
        for name in missing_parameters(theirs, ours):
            yield f"{path}({name}=)"
    if not inspect.isclass(theirs):
        return
    if issubclass(theirs, enum.Enum):
        yield from (f"{path}.{m}" for m in theirs.__members__ if m not in ours.__members__)
    elif dataclasses.is_dataclass(theirs):
        fields = {f.name for f in dataclasses.fields(ours)}
        yield from (f"{path}.{f.name}" for f in dataclasses.fields(theirs) if f.name not in fields)
    yield from member_differences(path, theirs, ours)


def member_differences(path: str, theirs: type, ours: Any) -> Iterator[str]:
    for name, member in public_members(theirs):
        if not hasattr(ours, name) and not is_on_instances(ours, name):
            yield f"{path}.{name}"
        elif inspect.isfunction(function := getattr(member, "__func__", member)):
            lost = missing_parameters(function, getattr(ours, name))
            yield from (f"{path}.{name}({parameter}=)" for parameter in lost)


def is_on_instances(kind: type, name: str) -> bool:
    """Whether a class says that its instances have the attribute."""
    return any(name in vars(parent).get("__annotations__", {}) for parent in kind.__mro__)


def test_enough_is_walked() -> None:
    walked = {module for module, _ in COUNTED}
    assert len(COUNTED) > 600
    for name in [
        "accelerator",
        "data_loader",
        "launchers",
        "state",
        "tracking",
        "utils.operations",
    ]:
        assert f"accelerate.{name}" in walked


@pytest.mark.parametrize("module", modules())
def test_every_name_of_a_module_is_there(module: str) -> None:
    names = [name for home, name in COUNTED if home == module]
    lost = [name for name in names if not hasattr(here(module), name)]
    assert not lost


@pytest.mark.parametrize("module", modules())
def test_every_parameter_and_member_of_a_module_is_there(module: str) -> None:
    theirs, ours = importlib.import_module(module), here(module)
    lost = []
    for name in (name for home, name in COUNTED if home == module):
        lost += differences(name, getattr(theirs, name), getattr(ours, name, None))
    assert not lost


@pytest.fixture
def _their_state() -> Iterator[None]:
    """Let HF's Accelerator be made, and leave nothing of it behind."""
    accelerate.Accelerator(cpu=True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("name", ["Accelerator", *STATES])
@pytest.mark.usefixtures("_their_state")
def test_what_an_instance_of_theirs_has_ours_has(name: str) -> None:
    home = "accelerate.state" if name in STATES else "accelerate.accelerator"
    theirs = set(vars(getattr(importlib.import_module(home), name)()))
    ours = getattr(here(home), name)()
    assert len(theirs) > 3
    assert not [n for n in theirs if n[0] != "_" and n not in IN_THE_PLAN and not hasattr(ours, n)]


def refusals() -> list[tuple[str, str]]:
    return [
        (home, name)
        for home, name in COUNTED
        if isinstance(getattr(here(home), name, None), refused.Refusal)
    ]


@pytest.mark.parametrize(("module", "name"), refusals())
def test_a_refused_name_says_why_and_what_instead(module: str, name: str) -> None:
    value = getattr(here(module), name)
    assert not isinstance(object(), value)
    with pytest.raises(Unsupported) as caught:
        value()
    assert name in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_only_names_of_theirs_are_refused() -> None:
    known = {name for _, name in COUNTED}
    stale = [
        name
        for family in refused.FAMILIES
        for names in family.names.values()
        for name in names.split()
        if name not in known
    ]
    assert not stale


@pytest.mark.parametrize("module", sorted(refused.WITHOUT_FILE))
def test_a_module_without_a_file_is_imported_like_any_other(module: str) -> None:
    found = here(f"accelerate.{module}")
    assert importlib.util.find_spec(found.__name__).name == found.__name__
    assert importlib.reload(found) is found
    assert not (Path(refused.__file__).parent / f"{module.replace('.', '/')}.py").exists()
    for name in refused.names(module):
        value = getattr(found, name)
        assert value.__module__ == found.__name__
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_module_without_a_file_is_an_attribute_of_its_package() -> None:
    program = f"import {OURS} as ours; print(ours.utils.ao.__name__, ours.checkpointing.__name__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == [f"{OURS}.utils.ao", f"{OURS}.checkpointing"], ran.stderr


def imported(module: str) -> list[str]:
    """Return the public names of a module of theirs that other modules of theirs bind."""
    found = vars(importlib.import_module(module))
    homes = {name: str(getattr(value, "__module__", "")) for name, value in found.items()}
    return [n for n, home in homes.items() if n[0] != "_" and home.startswith("accelerate.")]


# These read the file of a launch, or are the inside of HF's way to write it.
OF_COMMANDS = ("SageMakerConfig", "get_free_port")


@pytest.mark.parametrize(
    "module",
    [
        "accelerator",
        "checkpointing",
        "data_loader",
        "hooks",
        "launchers",
        "optimizer",
        "state",
        "tracking",
        "utils.imports",
        "utils.launch",
        "utils.memory",
        "utils.modeling",
        "utils.operations",
        "utils.other",
        "utils.random",
    ],
)
def test_what_a_module_of_theirs_imports_can_be_imported_here(module: str) -> None:
    names = [name for name in imported(f"accelerate.{module}") if name not in OF_COMMANDS]
    assert len(names) > 3
    ours = here(f"accelerate.{module}")
    assert not [name for name in names if not hasattr(ours, name)]
    homes = [str(getattr(getattr(ours, name), "__module__", "")) for name in names]
    assert not [home for home in homes if home.startswith("accelerate")]


def test_loggers_are_those_of_the_modules_that_they_are_asked_of() -> None:
    for module in ("accelerator", "data_loader", "tracking"):
        assert here(f"accelerate.{module}").logger.logger.name == f"{OURS}.{module}"
    with pytest.raises(AttributeError, match="data_loader' has no attribute 'no_such_name'"):
        _ = here("accelerate.data_loader").no_such_name


def test_private_helpers_that_public_packages_import_do_as_theirs() -> None:
    import argparse

    import torch

    from anytrain.compat.accelerate.utils import _filter_args
    from anytrain.compat.accelerate.utils.imports import _is_package_available
    from anytrain.compat.accelerate.utils.modeling import _get_proper_dtype

    assert _is_package_available("torch")
    assert not _is_package_available("no_such_library")
    assert _get_proper_dtype("torch.float16") is _get_proper_dtype(torch.float16) is torch.float16
    parser = argparse.ArgumentParser()
    parser.add_argument("--known", type=int, default=1)
    found = _filter_args(argparse.Namespace(known=3, strange=4), parser)
    assert vars(found) == {"known": 3}


def test_a_model_that_was_spread_can_be_moved_again_without_its_hooks() -> None:
    from torch import nn

    from anytrain.compat.accelerate.hooks import remove_hook_from_module

    model = nn.Sequential(nn.Linear(1, 1))
    for part in (model, model[0]):
        part.__dict__["to"] = lambda *args: pytest.fail("it was spread over devices")
    assert remove_hook_from_module(model, recurse=True).to("cpu") is model
    model[0].to("cpu")
