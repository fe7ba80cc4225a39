"""Refuse an optimizer's state that another kind of optimizer left.

An optimizer takes any state, and fails inside its first step where it finds no `momentum` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anytrain.core.errors import CheckpointError
from anytrain.engine.prepared.optimizer import PreparedOptimizer

_HARMLESS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
    | {"params", "param_names", "initial_lr"}
)
"""What says how an update runs, what a version of torch added, and what is no option at all."""


def describe(optimizer: PreparedOptimizer) -> dict[str, Any]:
    """Return what a checkpoint notes of an optimizer's kind: its class, its options' names."""
    kind = type(optimizer.optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "options": sorted(map(str, _defaults(optimizer))),
    }


def check(
    optimizer: PreparedOptimizer, state: Any, noted: Mapping[str, Any] | None, path: Path
) -> frozenset[str]:
    """Refuse the state of another kind of optimizer; return the options that it must have.

    `noted` is what `describe` gave when it was saved. Kinds with the same options, as Adam and
    AdamW are, take each other's state. Where nothing was noted, the options in the state tell.
    """
    if noted is not None:
        _compare(optimizer, noted, path)
        return frozenset(map(str, noted["options"])) - _HARMLESS
    saved_groups = state.get("param_groups") if isinstance(state, Mapping) else None
    groups = saved_groups if isinstance(saved_groups, list) else []
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        wanted, given = set(own), set(saved) if isinstance(saved, Mapping) else set()
        # An older version of the same optimizer lacks some, and knows none besides.
        lacking = (wanted & set(_defaults(optimizer))) - given - _HARMLESS
        unknown = given - wanted - _HARMLESS
        if lacking and unknown:
            raise _of_another_kind(optimizer, None, lacking, unknown, path)
    return frozenset()


def _compare(optimizer: PreparedOptimizer, noted: Mapping[str, Any], path: Path) -> None:
    own = describe(optimizer)
    if own["class"] == noted["class"] or not (own["options"] and noted["options"]):
        return
    wanted, saved = (set(each["options"]) - _HARMLESS for each in (own, noted))
    if wanted != saved:
        raise _of_another_kind(optimizer, noted["class"], wanted - saved, saved - wanted, path)


def _of_another_kind(
    optimizer: PreparedOptimizer,
    saved: str | None,
    lacking: set[str],
    unknown: set[str],
    path: Path,
) -> CheckpointError:
    own = str(describe(optimizer)["class"])
    theirs, ours = _told_apart(saved, own)
    reasons = [f"{ours} needs what was not saved ({_listed(lacking)})"] if lacking else []
    if unknown:
        reasons.append(f"{ours} does not know what was saved ({_listed(unknown)})")
    return CheckpointError(
        f"Cannot load {path}: its optimizer is {theirs}, this run's is {ours}.",
        why="; ".join(reasons) + ".",
        fix="go on with the optimizer that was saved. To train on with another, begin a new run "
        "from the saved model.",
    )


def _told_apart(saved: str | None, own: str) -> tuple[str, str]:
    """Return both classes' names, with their modules where they are called the same."""
    short = own.rpartition(".")[2]
    if saved is None:
        return "of another kind", short
    theirs = saved.rpartition(".")[2]
    return (saved, own) if theirs == short else (theirs, short)


def _defaults(optimizer: PreparedOptimizer) -> Mapping[str, Any]:
    """Return an optimizer's options; one that only looks like torch's may have none."""
    return getattr(optimizer.optimizer, "defaults", None) or {}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
