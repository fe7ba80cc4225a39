"""Check that a checkpoint can be put into a run, before anything of the run is touched.

Its files are whole by now. What they hold is compared with what this run would save: kinds and
ranges of all fields, names and shapes of tensors, whose values need not be read for that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anytrain.core.errors import AnytrainError, CheckpointError
from anytrain.engine.assemble.run import Run
from anytrain.engine.checkpoint import Loaded, check_fit, schema, state_schema
from anytrain.engine.checkpoint.huggingface import HFCheckpoint
from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.engine.checkpoint.store import blaming
from anytrain.engine.prepared.optimizer import PreparedOptimizer, PreparedScheduler

_HARMLESS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
    | {"params", "param_names", "initial_lr"}
)
"""What says how an update runs, what a version of torch added, and what is no option at all."""


def name_of(kind: str, position: int) -> str:
    """Return the name of the part that holds the object at a position among those of its kind."""
    return kind if position == 0 else f"{kind}_{position}"


def check_meta(loaded: Loaded) -> None:
    """Raise CheckpointError where what the manifest says of the run has no meaning."""
    with blaming(loaded.path, MANIFEST):
        schema.check(loaded.meta, state_schema.META, "meta")


def check_models(models: Sequence[nn.Module], loaded: Loaded, *, strict: bool) -> None:
    """Raise CheckpointError where one of the models cannot take its weights."""
    check_count("model", len(models), loaded.meta["num_models"], loaded)
    for position, model in enumerate(models):
        outline = loaded.model(position, outline=True)
        check_fit(model, outline, strict=strict, source=loaded.source(position))


def check_optimizers(run: Run, loaded: Loaded) -> None:
    """Raise CheckpointError where an optimizer or a schedule cannot take its state."""
    check_saved("optimizer", len(run.optimizers), loaded)
    noted = loaded.meta.get("optimizers")  # older checkpoints hold none
    if noted is not None:
        with blaming(loaded.path, MANIFEST):
            schema.check(
                noted, schema.Each(schema.Anything(), len(run.optimizers)), "meta.optimizers"
            )
    for number, optimizer in enumerate(run.optimizers):
        name, kind = name_of("optimizer", number), noted and noted[number]
        outline, file = loaded.outline(name), str(loaded.manifest.parts[name])
        _check_optimizer(optimizer, outline, kind, loaded.path, file)
    check_saved("scheduler", len(run.schedulers), loaded)
    for number, scheduler in enumerate(run.schedulers):
        name = name_of("scheduler", number)
        state, file = loaded.part(name), str(loaded.manifest.parts[name])
        _check_schedule(scheduler, state, loaded.path, file)


def check_values(optimizer: Any, state: Any, name: str, loaded: Loaded) -> None:
    """Raise CheckpointError where a large tensor, of which an outline tells nothing, is no good."""
    with blaming(loaded.path, str(loaded.manifest.parts[name])):
        state_schema.check_optimizer(optimizer.optimizer, state)


def _inner(scheduler: Any) -> Any:
    """Return the schedule that keeps the state; a Trainer's plateau is not wrapped."""
    return scheduler.scheduler if isinstance(scheduler, PreparedScheduler) else scheduler


def check_hf_optimizers(run: Run, found: HFCheckpoint) -> None:
    """Raise CheckpointError where another library's optimizers and schedules do not fit."""
    for number, optimizer in enumerate(run.optimizers):
        state, file = found.optimizers.get(number), name_of("optimizer", number)
        _check_optimizer(optimizer, state, None, found.path, file)
    for number, scheduler in enumerate(run.schedulers):
        state, file = found.schedulers.get(number), name_of("scheduler", number)
        _check_schedule(scheduler, state, found.path, file)


def _check_optimizer(
    optimizer: PreparedOptimizer, state: Any, noted: Any, path: Path, file: str
) -> None:
    needed = check_optimizer_kind(optimizer, state, noted, path)
    with blaming(path, file):
        state_schema.check_optimizer(optimizer.optimizer, state, needed)


def _check_schedule(scheduler: Any, state: Any, path: Path, file: str) -> None:
    with blaming(path, file):
        state_schema.check_schedule(_inner(scheduler), state)
    _try_schedule(_inner(scheduler), state, path, file)


def check_hf_states(run: Run, found: HFCheckpoint) -> None:
    """Raise CheckpointError where another library's scaler or random generators do not fit."""
    session = run.session
    if session.precision.scale is not None and found.scalers:
        with blaming(found.path, "scaler.pt"):
            schema.check(found.scalers.get(0), state_schema.SCALER)
    generators = {f"{name}?": kind for name, kind in state_schema.GENERATORS.items()}
    with blaming(found.path, f"the random states of rank {session.world.rank}"):
        schema.check(found.rng.get(session.world.rank, {}), generators)


def check_standing(run: Run, loaded: Loaded, registered: Sequence[Any]) -> None:
    """Raise CheckpointError where the position in the data or the loop cannot be taken."""
    check_saved("loader", len(run.loaders), loaded)
    for number, loader in enumerate(run.loaders):
        check_loader(loader, loaded, number)
    loaded.check("cursor", state_schema.CURSOR)
    if run.session.precision.scale is not None:
        loaded.check("scaler", state_schema.SCALER)
    check_saved("registered", len(registered), loaded)
    for number, obj in enumerate(registered):
        name = name_of("registered", number)
        if isinstance(obj, LRScheduler):
            loaded.check(name, partial(state_schema.check_schedule, obj))
        elif isinstance(obj, Optimizer):
            loaded.check(name, partial(state_schema.check_optimizer, obj))
        else:
            loaded.outline(name)  # its fields are its owner's: see that the file can be read


def check_loader(loader: Any, loaded: Loaded, number: int = 0) -> None:
    """Raise CheckpointError where a loader's position in the data cannot be taken."""
    wanted = partial(
        state_schema.check_loader,
        generator=loader.walk.generator,
        layout=loader.layout_names,
        num_samples=loader.num_samples(),
    )
    loaded.check(name_of("loader", number), wanted)


def check_own(run: Run, loaded: Loaded) -> None:
    """Raise CheckpointError where this rank's own part cannot be taken."""
    session, rank = run.session, run.session.world.rank
    check_gradients(run, loaded, rank)

    def take(state: Any) -> None:
        now = session.backend.rng_state(session.device)
        try:
            session.backend.restore_rng(session.device, state)
        finally:
            if now is not None:
                session.backend.restore_rng(session.device, now)

    words = f"a state of the random generator of {session.device}"
    device: schema.Description = schema.Taken(words, take)
    kind = {"device_kind": schema.Text()}
    loaded.check_rank("rng", rank, {**state_schema.GENERATORS, **kind, "device": schema.Anything()})
    if loaded.rank_part("rng", rank)["device_kind"] == session.backend.name:
        loaded.check_rank("rng", rank, {"device": schema.Maybe(device)})
    if "losses" in loaded.rank_part_names:
        curve = {"sum": schema.Number(finite=False), "num": schema.Whole(), "at": schema.Whole()}
        loaded.check_rank("losses", rank, curve)


def check_gradients(run: Run, loaded: Loaded, rank: int) -> None:
    """Raise CheckpointError where a rank's gradients are of no parameter here."""
    own = {
        f"{position}.{name}": parameter
        for position, model in enumerate(run.models)
        for name, parameter in model.named_parameters()
    }
    loaded.check_rank("gradients", rank, partial(state_schema.check_gradients, own))


def check_saved(kind: str, wanted: int, loaded: Loaded) -> None:
    """Raise CheckpointError where the checkpoint holds another number of a kind."""
    saved = sum(1 for name in loaded.part_names if name == kind or _is_nth(name, kind))
    check_count(kind, wanted, saved, loaded)


def check_count(kind: str, wanted: int, saved: int, loaded: Loaded) -> None:
    """Raise CheckpointError where the numbers differ."""
    if wanted != saved:
        raise CheckpointError(
            f"Cannot load {loaded.path}: it holds {saved} of kind {kind!r}, this run has {wanted}.",
            why=f"a run is restored whole; what {MANIFEST} lacks would start afresh unnoticed.",
            fix="prepare and register the same objects as when it was saved, then load.",
        )


def _try_schedule(scheduler: Any, state: Any, path: Path, file: str) -> None:
    """Let a schedule take the state, and take its own again."""
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        lacks = f"this run's needs {error}, which was not saved"
        reason = lacks if isinstance(error, KeyError) else _told(error)
        raise CheckpointError(
            f"Cannot load {path}: its schedule of the learning rate is not of this run's kind.",
            why=f"{file}: {reason}.",
            fix="go on with the schedule that was saved (lr_scheduler_type). To train on with "
            "another, begin a new run from the saved model.",
        ) from error
    finally:
        scheduler.load_state_dict(before)


def restore_registered(registered: Sequence[Any], loaded: Loaded) -> None:
    """Put back what was registered. It comes first, as its owner's code may refuse its state.

    All of it is then as it was before.
    """
    before: list[tuple[Any, Any]] = []
    for position, obj in enumerate(registered):
        name = name_of("registered", position)
        state = loaded.part(name)
        before.append((obj, copy.deepcopy(obj.state_dict())))
        try:
            obj.load_state_dict(state)
        except Exception as error:
            for each, kept in reversed(before):
                with suppress(Exception):  # the first error is the one to tell
                    each.load_state_dict(kept)
            if isinstance(error, AnytrainError):
                raise
            file = loaded.manifest.parts[name]
            raise CheckpointError(
                f"Cannot load {loaded.path}: a {type(obj).__name__} does not take what {file} "
                "holds.",
                why=f"{_told(error)}, in its load_state_dict().",
                fix="register the same objects in the same order as when it was saved, or resume "
                "from another checkpoint.",
            ) from error


def _told(error: Exception) -> str:
    return f"it raised {type(error).__name__}: {error}"


def _is_nth(name: str, kind: str) -> bool:
    return name.startswith(f"{kind}_") and name[len(kind) + 1 :].isdigit()


def describe_optimizer(optimizer: PreparedOptimizer) -> dict[str, Any]:
    """Return what a checkpoint notes of an optimizer's kind: its class, its options' names."""
    kind = type(optimizer.optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "options": sorted(map(str, _defaults(optimizer))),
    }


def check_optimizer_kind(
    optimizer: PreparedOptimizer, state: Any, noted: Mapping[str, Any] | None, path: Path
) -> frozenset[str]:
    """Refuse the state of another kind of optimizer; return the options that it must have.

    `noted` is what `describe_optimizer` gave when it was saved. Kinds with the same options, as
    Adam and AdamW are, take each other's state. Where nothing was noted, the options in the state
    tell.
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
    own = describe_optimizer(optimizer)
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
    own = str(describe_optimizer(optimizer)["class"])
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
