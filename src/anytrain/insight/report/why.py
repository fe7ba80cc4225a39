"""Say where a run's time went, and what to do about it where something takes too much.

Everything is read from the run's record, so it works for a run that is over, that goes on, or
that was killed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytrain.core.clock import NAMES
from anytrain.core.records import Life, together
from anytrain.core.text import amount, in_no_checkpoint, one_line, safe_console
from anytrain.insight.pages.markup import Markup, joined, tag

if TYPE_CHECKING:
    from rich.console import Console

MEANING = {
    "start": "from the start of the process to the first batch",
    "data": "waiting for the next batch",
    "transfer": "copying batches to the device",
    "step": "computing",
    "wait": "waiting for the device to finish its steps",
    "evaluate": "evaluating",
    "save": "saving",
    "record": "compiling, or recording steps",
    "other": "the rest: callbacks, logging, trackers",
}
NOTHING = "Nothing takes too much of the time."
_SHOWN = 0.0005
_WIDTH = 100
_HEAD = ("time", "seconds", "share", "what")
_RIGHT = ("seconds", "share")
# From which share of the time after the start on something other than the step takes too much.
_TOO_MUCH = {
    "data": 0.1,
    "transfer": 0.05,
    "evaluate": 0.3,
    "save": 0.1,
    "record": 0.15,
    "other": 0.15,
}
_STEP = ("step", "wait")
_SLOW_START, _SLOW_START_S = 0.5, 5.0
_WORTH, _WORTH_S = 0.05, 0.5
"""A smaller share of the whole time, or less time, is not worth a word."""
# A process that computes all the time has a core at least, unless somebody takes it away.
_STARVED, _TELLING_S = 0.8, 5.0
_MANY_SHAPES = 3
_BUCKETS = 'length_buckets="auto"'


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What takes the most time beyond its due, and one thing to do about it."""

    name: str
    share: float
    remedy: str

    @property
    def is_step(self) -> bool:
        """Whether it is the step itself, which is what a run is for."""
        return self.name == "step"

    def line(self) -> str:
        """Return it as one line."""
        return f"{MEANING[self.name]}: {self.share:.0%}. {self.remedy}"


def shares(life: Life) -> dict[str, float]:
    """Return each name's share of the wall time; together they are 1."""
    seconds = life.seconds
    whole = sum(seconds.values())
    order = dict.fromkeys([*(name for name in NAMES if name in seconds), *seconds])
    return {name: seconds[name] / whole if whole else 0.0 for name in order}


def ledger(
    seconds: Mapping[str, float], shares: Mapping[str, float]
) -> list[tuple[str, float, float, str]]:
    """Return name, seconds, share and meaning of all that took time worth showing."""
    return [
        (name, seconds[name], share, MEANING.get(name, ""))
        for name, share in shares.items()
        if share >= _SHOWN
    ]


def training_seconds(life: Life) -> float:
    """Return the time between the first batch and the last, without evaluations and saves."""
    return sum(life.seconds.get(name, 0.0) for name in ("data", "transfer", "other", *_STEP))


def over_starts(count: int) -> str:
    """Return which starts the figures are of, where there are several."""
    return "" if count < 2 else f", over {'both' if count == 2 else f'all {count}'} starts"


def judge(life: Life) -> Bottleneck | None:
    """Return the one thing to change; None where nothing stands out."""
    seconds, found = life.seconds, shares(life)
    start = seconds.get("start", 0.0)
    # The start is paid once: what is paid at every step is weighed against the steps' own time.
    running = sum(seconds.values()) - start
    excess = {
        name: seconds[name] / running / bound
        for name, bound in _TOO_MUCH.items()
        if running and _is_worth_it(seconds.get(name, 0.0), found.get(name, 0.0))
    }
    worst = max(excess, key=excess.__getitem__, default="")
    if worst and excess[worst] >= 1:
        return Bottleneck(worst, found[worst], _REMEDIES[worst](life))
    if start >= _SLOW_START_S and found["start"] >= _SLOW_START:
        return Bottleneck("start", found["start"], _for_the_start(life))
    spent, share = (sum(each.get(name, 0.0) for name in _STEP) for each in (seconds, found))
    remedy = _for_the_step(life) if _is_worth_it(spent, share) else None
    return None if remedy is None else Bottleneck("step", share, remedy)


def _is_worth_it(seconds: float, share: float) -> bool:
    return seconds >= _WORTH_S and share >= _WORTH


def explain(lives: Sequence[Life]) -> dict[str, Any]:
    """Return everything there is to tell of a run, over all its starts, as plain values."""
    newest, life = lives[-1], together(lives)
    seconds, finding = life.seconds, judge(life)
    training = training_seconds(life)
    samples = life.began.get("samples_per_step")
    rate = life.num_steps * samples / training if samples and training else None
    return {
        "starts": len(lives),
        "state": newest.state,
        "host": newest.began.get("host"),
        "heard": newest.heard,
        "steps": life.num_steps,
        "step": life.last.get("step"),
        "max_steps": life.began.get("max_steps"),
        "wall_seconds": sum(seconds.values()),
        "seconds": seconds,
        "shares": shares(life),
        "hidden_seconds": life.last.get("hidden", 0.0),
        "samples_per_second": rate,
        "peak_bytes": life.last.get("peak_bytes"),
        "shapes": life.last.get("shapes"),
        "graphs": life.last.get("graphs"),
        "late_shapes": life.last.get("late_shapes"),
        "device": life.began.get("device"),
        "plan": {name: life.choice(name) for name in life.began.get("plan", {})},
        "revisions": life.revisions,
        "finding": None
        if finding is None
        else {"name": finding.name, "share": finding.share, "remedy": finding.remedy},
    }


class Why:
    """Where a run's time went, and what to do about it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        """All that is known, as plain values."""

    def print(self, console: Console) -> None:
        """Print it as `anytrain why` does."""
        from rich.table import Table
        from rich.text import Text

        told = self.told
        console.print(Text(one_line(heading(told)), style="bold"), soft_wrap=True)
        table = Table(*_HEAD)
        for column in table.columns:
            column.overflow = "fold"
            column.justify = "right" if column.header in _RIGHT else "left"
        for row in rows(told):
            table.add_row(*map(Text, row))
        console.print(table)
        for line in facts(told):
            console.print(Text(one_line(line)), soft_wrap=True)
        finding, remedy = verdict(told)
        console.print(Text(finding, style="bold" if remedy else ""))
        if remedy:
            console.print(Text(remedy), soft_wrap=True)

    def __repr__(self) -> str:
        file = io.StringIO()
        self.print(safe_console(file=file, width=_WIDTH, color_system=None, force_jupyter=False))
        return file.getvalue().rstrip()

    def _repr_html_(self) -> str:
        finding, remedy = verdict(self.told)
        return tag(
            "div",
            tag("p", tag("strong", one_line(heading(self.told)))),
            _table(self.told),
            tag("ul", (tag("li", one_line(line)) for line in facts(self.told))),
            tag("p", tag("strong", finding) if remedy else finding, " ", remedy),
        )


def _table(told: dict[str, Any]) -> Markup:
    def cells(kind: str, row: tuple[str, ...]) -> Markup:
        sides = ("right" if name in _RIGHT else "left" for name in _HEAD)
        return joined(
            tag(kind, cell, style=f"text-align:{side};padding:2px 12px 2px 0")
            for cell, side in zip(row, sides, strict=True)
        )

    body = (tag("tr", cells("td", row)) for row in rows(told))
    return tag("table", tag("thead", tag("tr", cells("th", _HEAD))), tag("tbody", body))


def rows(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each name that took time worth showing."""
    return [
        (one_line(name), f"{seconds:.1f}", f"{share:.1%}", one_line(meaning))
        for name, seconds, share, meaning in ledger(told["seconds"], told["shares"])
    ]


def verdict(told: dict[str, Any]) -> tuple[str, str]:
    """Return what takes too much, and what to do about it; that nothing does has no remedy."""
    finding = told["finding"]
    if finding is None:
        return NOTHING, ""
    return f"{finding['share']:.0%} of the time: {MEANING[finding['name']]}.", finding["remedy"]


def heading(told: dict[str, Any]) -> str:
    """Return how the run stands, in a line."""
    of = "" if told["max_steps"] is None else f" of {told['max_steps']}"
    times = over_starts(told["starts"])
    wall = f"{told['wall_seconds']:.1f} s"
    state = _heard(told) if told["state"] == "unknown" else told["state"]
    unsaved = told.get("unsaved")
    but = "" if unsaved is None else f", but {in_no_checkpoint(unsaved['since'])}"
    return f"{told['run']}: {state} at step {told['step']}{of} after {wall}{times}{but}"


def _heard(told: dict[str, Any]) -> str:
    """Say where a run of another host is, and when it last wrote."""
    when = "" if told["heard"] is None else time.strftime(" %F %T", time.localtime(told["heard"]))
    return f"on {told['host']}, last heard of{when},"


def facts(told: dict[str, Any]) -> list[str]:
    """Return what else is known, a line each."""
    found = [f"{name}: {value} ({because})" for name, (value, because) in told["plan"].items()]
    if told["samples_per_second"]:
        found.append(f"samples/s between batches: {told['samples_per_second']:.1f}")
    if told["peak_bytes"]:
        found.append(f"peak memory: {told['peak_bytes'] / 2**30:.2f} GiB")
    if told["shapes"]:
        found.append(f"shapes: {len(told['shapes'])} ({', '.join(told['shapes'][:8])})")
    if told["hidden_seconds"] >= 0.05:
        found.append(
            f"{told['hidden_seconds']:.1f} s of waiting for data cost nothing: the device was busy"
        )
    learnt = (
        f"at step {each['step']}: {each['choice']} became {each['value']} ({each['because']})"
        for each in told["revisions"]
    )
    return [*found, *dict.fromkeys(learnt)]  # each start may learn the same


# -- what to do about it --------------------------------------------------------------------------


def _setting(life: Life, name: str, default: Any = None) -> Any:
    return life.began.get("settings", {}).get(name, default)


def _for_data(life: Life) -> str:
    cores = int(life.began.get("num_cores") or 1)  # this rank's own
    workers = life.last.get("workers")
    if workers:
        return (
            f"{amount(int(workers), 'worker')} cannot keep up: do the work on each sample once and "
            "keep it (tokenise before training), or raise dataloader_num_workers."
        )
    if cores <= 2:
        return (
            "Do the work on each sample once, before training (tokenise, decode, resize), and keep "
            f"it. With {amount(cores, 'core')}, a worker (dataloader_num_workers=1) helps only "
            "where samples wait for a disk or a network."
        )
    return (
        f"Batches are made in the training process: pass dataloader_num_workers={min(cores - 1, 4)}"
        " (DataLoader(num_workers=...) in your own loop), or tokenise before training."
    )


def _for_transfer(life: Life) -> str:
    if _setting(life, "dataloader_pin_memory") is False:
        return "dataloader_pin_memory is off: leave it on, so that copies need not be waited for."
    return (
        "Give batches in pinned memory (DataLoader(pin_memory=True)), and leave out of them what "
        "the model does not read."
    )


def _for_evaluation(life: Life) -> str:
    size, steps = _setting(life, "per_device_eval_batch_size"), _setting(life, "eval_steps")
    larger = (
        f"a larger per_device_eval_batch_size (now {size}): no gradients are kept in it"
        if size
        else "larger batches: no gradients are kept in them"
    )
    every = _setting(life, "eval_strategy")
    if every == "steps" and steps:
        return f"Evaluate less often than {_every(steps)} (eval_steps), or with {larger}."
    return f"Evaluate with {larger}, or less often."


def _for_saving(life: Life) -> str:
    asynchronous, steps = _setting(life, "async_save"), _setting(life, "save_steps")
    if asynchronous is False:
        return (
            "Saves are waited for: leave async_save on, so that they are written behind the loop."
        )
    if asynchronous is None:
        return "Call save_state(blocking=False), which writes behind the loop, or save less often."
    every = _every(steps) if _setting(life, "save_strategy") == "steps" else "so often"
    return (
        f"The disk does not keep up with a save {every}: save less often (save_steps), or the "
        "model alone (save_only_model=True)."
    )


def _for_recording(life: Life) -> str:
    shapes = life.last.get("shapes") or []
    if len(shapes) > 1 and life.choice("shapes")[0] != "buckets":
        return (
            f"Batches came in {amount(len(shapes), 'shape')}, and each is recorded or compiled "
            f"once: bound their number with {_BUCKETS}."
        )
    return (
        "This is paid once: in a longer run it is a smaller share, and the next run finds what was "
        "compiled."
    )


def _for_the_start(life: Life) -> str:
    return (
        "Imports, the model and the data come before the first batch: keep tokenised data between "
        "runs, and load the model from a local folder."
    )


def _for_the_rest(life: Life) -> str:
    every = _setting(life, "logging_steps")
    rarer = f" (logging_steps, now {every:g})" if isinstance(every, int | float) else ""
    return f"Look at your callbacks and trackers, and log less often{rarer}."


def _for_the_step(life: Life) -> str | None:
    """Return what would make the step itself faster, as far as the plan tells."""
    device = life.choice("device")[0] or str(life.began.get("device", ""))
    step, because = life.choice("step")
    if "graphs" in life.last:
        return _for_compiling(life)
    if device.startswith("cuda") and step == "eager":
        return f"Each kernel is launched from Python, because the step is not recorded: {because}."
    cores = _cores_had(life)
    if device.startswith("cpu") and cores is not None and cores < _STARVED:
        return (
            f"The run got {cores:.1f} of a core: other programs or a limit take the rest of the "
            "processor. Stop what runs beside it, or raise the limit."
        )
    if life.choice("precision")[0] == "no" and device.startswith(("cpu", "cuda")):
        return (
            "The step computes in float32: bf16=True (mixed_precision='bf16') is faster where "
            "the device has it."
        )
    shapes = life.last.get("shapes") or []
    if len(shapes) == 1 and life.choice("shapes")[0] == "any":
        return f"Every batch is padded to one shape ({shapes[0]}): pad less with {_BUCKETS}."
    return None


def _for_compiling(life: Life) -> str | None:
    """Return what would save graphs, where each shape is compiled."""
    late = life.last.get("late_shapes") or {}
    name, times = max(late.items(), key=lambda each: each[1], default=("", 0))
    if times < _MANY_SHAPES:
        return None
    return (
        f"{name!r} had {times} new shapes after the first batches, and each was compiled "
        f"({amount(int(life.last['graphs']), 'graph')} in all): bound their number with "
        f"{_BUCKETS}, and pass drop_last=True."
    )


def _every(steps: float) -> str:
    return "every step" if steps == 1 else f"every {steps:g} steps"


def _cores_had(life: Life) -> float | None:
    """Return how many cores the process was given on average; None where it is too soon."""
    began, last = life.began, life.last
    if "cpu_seconds" not in began or "cpu_seconds" not in last:
        return None
    seconds = float(last["time"]) - float(began["time"])
    spent = float(last["cpu_seconds"]) - float(began["cpu_seconds"])
    return spent / seconds if seconds > _TELLING_S else None


_REMEDIES = {
    "data": _for_data,
    "transfer": _for_transfer,
    "evaluate": _for_evaluation,
    "save": _for_saving,
    "record": _for_recording,
    "other": _for_the_rest,
}
