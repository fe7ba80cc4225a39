"""What a Trainer and an Accelerator say of themselves where somebody looks at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from anytrain.core.text import Sheet, amount
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session

_PRECISIONS = {"no": "float32"}
NOWHERE = "none: nothing is recorded"


class Described:
    """Shown as a title and some lines; a notebook shows a table."""

    def _sheet(self) -> Sheet:
        raise AssertionError("each says what it is")

    def __repr__(self) -> str:
        try:
            return repr(self._sheet())
        except Exception:  # noqa: BLE001  half made, or over: a debugger looks at these too
            return object.__repr__(self)

    def _repr_html_(self) -> str | None:
        try:
            return self._sheet()._repr_html_()
        except Exception:  # noqa: BLE001
            return None


def sheet(
    title: str,
    session: Session,
    models: Sequence[nn.Module | None],
    rows: Sequence[tuple[str, object]],
    folder: Any,
    why: str,
) -> Sheet:
    """Return what a run is, with what its door adds, its folder, and where the reasons are."""
    plan = session.plan
    batches = plan.accumulation.value
    told: list[tuple[str, object]] = [
        ("model", ", ".join(_model(each) for each in models if each is not None) or "none yet"),
        ("device", session.device),
        ("precision", _PRECISIONS.get(plan.precision.value, plan.precision.value)),
        ("strategy", f"{plan.strategy.value}: {_processes(session)}"),
        ("step", plan.step.value + ("" if batches == "1" else f", {batches} batches an update")),
        *rows,
        ("folder", folder),
        ("reasons", why),
    ]
    return Sheet(title, told)


def run_facts(run: Run) -> dict[str, Any]:
    """Return what a run says of itself to its observer."""
    session = run.session
    return {
        "precision": session.plan.precision.value,
        "accumulation": session.cursor.accumulation.num_steps,
        "scales_gradients": session.precision.scale is not None,
        "finds_unused": bool(run.options.ddp.get("find_unused_parameters", False)),
    }


def _processes(session: Session) -> str:
    world = session.world
    number = amount(world.size, "process")
    return number if world.size == 1 else f"{number}, of which this is rank {world.rank}"


def _model(model: nn.Module) -> str:
    # A parameter that is still to be made has no number yet.
    sizes = [p.numel() for p in model.parameters() if not nn.parameter.is_lazy(p)]
    return f"{type(model).__name__} with {amount(sum(sizes), 'parameter')}"
