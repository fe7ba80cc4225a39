"""Say where a run's time went, and what to do about it where something takes too much.

Everything is read from the run's record, so it works for a run that is over, that goes on, or
that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anytrain.core.clock import NAMES
from anytrain.core.records import Life, together
from anytrain.core.text import amount

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


@dataclass(frozen=True, slots=True)
class Finding:
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


def over(lives: Sequence[Life]) -> str:
    """Return which starts the figures are of, where there are several."""
    return over_starts(len(lives))


def over_starts(count: int) -> str:
    """Return the same of a number of starts."""
    return "" if count < 2 else f", over {'both' if count == 2 else f'all {count}'} starts"


def judge(life: Life) -> Finding | None:
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
        return Finding(worst, found[worst], _REMEDIES[worst](life))
    if start >= _SLOW_START_S and found["start"] >= _SLOW_START:
        return Finding("start", found["start"], _for_the_start(life))
    spent, share = (sum(each.get(name, 0.0) for name in _STEP) for each in (seconds, found))
    remedy = _for_the_step(life) if _is_worth_it(spent, share) else None
    return None if remedy is None else Finding("step", share, remedy)


def _is_worth_it(seconds: float, share: float) -> bool:
    return seconds >= _WORTH_S and share >= _WORTH


def tell(lives: Sequence[Life]) -> dict[str, Any]:
    """Return everything there is to tell of a run, over all its starts, as plain values."""
    newest, life = lives[-1], together(lives)
    seconds, finding = life.seconds, judge(life)
    training = sum(seconds.get(name, 0.0) for name in ("data", "transfer", "other", *_STEP))
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


_MANY_SHAPES = 3
_BUCKETS = 'length_buckets="auto"'
_REMEDIES = {
    "data": _for_data,
    "transfer": _for_transfer,
    "evaluate": _for_evaluation,
    "save": _for_saving,
    "record": _for_recording,
    "other": _for_the_rest,
}
