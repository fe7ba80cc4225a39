"""Who can be compared: each in its own process, with the library it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from anytrain.core.nearest import unknown

_HERE = "anytrain.recipes.bench"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train, and where its function is."""

    name: str
    what: str
    run: str
    library: str
    precision: str
    """fp32, tf32, bf16; or auto, which the device decides."""
    padding: str
    """max: to the length asked for. dynamic: to the longest of a batch. sorted: the same, with
    rows of like length together. buckets: what anytrain chooses."""
    needs_cuda: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether anytrain trains it."""
        return self.library == "anytrain"

    @property
    def is_missing(self) -> bool:
        """Whether its library is not installed here."""
        return find_spec(self.library) is None


def _table() -> dict[str, Contender]:
    ours, step = f"{_HERE}.ours:trainer", f"{_HERE}.ours:own_loop"
    hf, loop = f"{_HERE}.peers:hf_trainer", f"{_HERE}.peers:accelerate_loop"
    fabric, raw = f"{_HERE}.peers:fabric_loop", f"{_HERE}.raw:loop"
    hf_padded = "HF Trainer"
    rows = (
        ("anytrain", "anytrain Trainer, as `anytrain glue`", ours, "anytrain", "auto", "buckets"),
        ("anytrain-bf16-padded", "anytrain Trainer", ours, "anytrain", "bf16", "max"),
        ("anytrain-fp32", "anytrain Trainer", ours, "anytrain", "fp32", "buckets"),
        ("anytrain-fp32-padded", "anytrain Trainer", ours, "anytrain", "fp32", "max"),
        ("anytrain-step", "own loop, accelerator.step", step, "anytrain", "auto", "dynamic"),
        ("hf", "HF Trainer, as it comes", hf, "transformers", "fp32", "max"),
        ("hf-tf32", hf_padded, hf, "transformers", "tf32", "max"),
        ("hf-fp32-dynamic", hf_padded, hf, "transformers", "fp32", "dynamic"),
        ("hf-bf16", hf_padded, hf, "transformers", "bf16", "max"),
        ("hf-bf16-dynamic", hf_padded, hf, "transformers", "bf16", "dynamic"),
        ("accelerate-bf16", "Accelerate loop", loop, "accelerate", "bf16", "max"),
        ("accelerate-bf16-dynamic", "Accelerate loop", loop, "accelerate", "bf16", "dynamic"),
        ("fabric-bf16", "Lightning Fabric loop", fabric, "lightning", "bf16", "max"),
        ("fabric-bf16-dynamic", "Lightning Fabric loop", fabric, "lightning", "bf16", "dynamic"),
        ("raw-fp32", "raw PyTorch loop", raw, "torch", "fp32", "max"),
        ("raw-bf16", "raw PyTorch loop", raw, "torch", "bf16", "max"),
        ("raw-bf16-sorted", "raw loop, batches of like length", raw, "torch", "bf16", "sorted"),
    )
    return {row[0]: Contender(*row, needs_cuda=row[4] == "tf32") for row in rows}


CONTENDERS = _table()
BASE = "hf"
# Where all rows have one length, padding makes no difference, and float32 takes very long.
_FOR_EVEN_ROWS = (
    "anytrain",
    "anytrain-step",
    "hf-bf16",
    "accelerate-bf16",
    "fabric-bf16",
    "raw-bf16",
)


def choose(asked: str, *, even: bool) -> list[Contender]:
    """Return the contenders that are asked for by name, or those that make sense."""
    names: Sequence[str] = [name for name in asked.replace(" ", "").split(",") if name]
    wrong = [name for name in names if name not in CONTENDERS]
    if wrong:
        fix = "name some of them, separated by commas, or none for all."
        raise unknown("contender", wrong[0], CONTENDERS, fix=fix)
    return [CONTENDERS[name] for name in names or (_FOR_EVEN_ROWS if even else CONTENDERS)]
