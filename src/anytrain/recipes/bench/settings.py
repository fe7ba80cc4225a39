"""What is compared: the sizes of model and data, and the settings that all contenders share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.nearest import unknown


@dataclass(frozen=True, slots=True)
class Size:
    """A model with random weights, and data that it can learn from."""

    head: str
    """What the model learns: "classify" or "causal"."""
    config: dict[str, Any]
    """Values of the model's configuration that are not the usual ones."""
    length: int
    num_rows: int
    batch_size: int
    epochs: int
    learning_rate: float
    even: bool = False
    """Whether every row is as long as `length`, so that padding does not matter."""

    @property
    def num_eval_rows(self) -> int:
        """How many rows are held out: as MRPC has it."""
        return max(self.num_rows // 9, 8)


_TINY = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
# The first three have MRPC's 3,668 rows and lengths (a mean of 53 tokens), or part of them.
SIZES = {
    "tiny": Size("classify", _TINY, 128, 192, 16, 2, 5e-3),
    "minilm": Size("classify", _MINILM, 128, 3668, 32, 3, 5e-5),
    "bert-base": Size("classify", {}, 128, 3668, 32, 3, 2e-5),
    "bert-large-512": Size("classify", _LARGE, 512, 1280, 32, 1, 2e-5, even=True),
    "gpt2-small-1024": Size("causal", {}, 1024, 512, 8, 1, 2e-4, even=True),
    "tiny-causal": Size(
        "causal", {"vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 2}, 64, 96, 8, 1, 1e-3,
        even=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What every contender is given alike."""

    size: str
    model: str | None
    """A folder with real weights and a tokenizer, in place of the size's random ones."""
    data: str | None
    """A folder with train.tsv.gz and dev.tsv.gz, in place of made-up rows."""
    length: int
    batch_size: int
    epochs: int
    learning_rate: float
    max_steps: int
    """Steps after which a training ends; 0 trains all epochs."""
    warm_up_steps: int
    cpu: bool
    shapes: tuple[tuple[int, int], ...] | None
    """Batches of (rows, length) whose single steps are measured; None chooses them."""
    shape_steps: tuple[int, int, int]
    """For a measured shape: steps before the timing, timed, and under the profiler."""

    @property
    def head(self) -> str:
        """What the model learns: "classify" or "causal"."""
        return SIZES[self.size].head

    @property
    def is_even(self) -> bool:
        """Whether no row needs padding."""
        return SIZES[self.size].even and self.data is None

    def check(self) -> None:
        """Refuse what could not run."""
        if self.data and not self.model:
            raise BadInput(
                "Cannot read real rows without a tokenizer.",
                why="--data names texts, and the model of --model brings the tokenizer.",
                fix="pass --model FOLDER too, or leave out --data.",
            )
        for folder in filter(None, (self.model, self.data)):
            if not Path(folder).is_dir():
                raise BadInput(
                    f"Cannot find {folder!r}.", why="there is no such folder.", fix="correct it."
                )
        if self.model and self.head == "causal":
            raise BadInput(
                f"Cannot use --model with --size {self.size}.",
                why="real weights are for classification; this size is a language model.",
                fix="leave out --model.",
            )

    def save(self, path: Path) -> None:
        """Write them for the child processes."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> BenchSettings:
    """Return what `save` wrote."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["shapes"] is not None:
        kept["shapes"] = tuple((rows, length) for rows, length in kept["shapes"])
    kept["shape_steps"] = tuple(kept["shape_steps"])
    return BenchSettings(**kept)


def read_shapes(text: str) -> tuple[tuple[int, int], ...] | None:
    """Return the shapes that a text names; None leaves the choice to the device.

    >>> read_shapes("32x128,32x48")
    ((32, 128), (32, 48))
    >>> read_shapes("none")
    ()
    """
    if text in ("", "none"):
        return () if text else None
    found = []
    for word in filter(None, text.replace(" ", "").split(",")):
        rows, cross, length = word.partition("x")
        if not (cross and rows.isdecimal() and length.isdecimal() and int(rows) * int(length)):
            raise BadInput(
                f"Cannot read the shape {word!r}.",
                why="a shape is a number of rows, an x and a number of tokens.",
                fix="write --shapes 32x128,32x48, or --shapes none.",
            )
        found.append((int(rows), int(length)))
    return tuple(found)


def read_steps(text: str) -> tuple[int, int, int]:
    """Return the three counts that a text names.

    >>> read_steps("30,50,30")
    (30, 50, 30)
    """
    words = text.replace(" ", "").split(",")
    if len(words) != 3 or not all(word.isdecimal() for word in words) or "0" in words[:2]:
        raise BadInput(
            f"Cannot read the steps {text!r}.",
            why="three counts are needed: steps before, steps timed, steps under the profiler.",
            fix="write --shape_steps 30,50,30.",
        )
    before, timed, profiled = map(int, words)
    return before, timed, profiled


def check_size(name: str) -> Size:
    """Return the size of that name, or refuse it."""
    if name in SIZES:
        return SIZES[name]
    raise unknown("size", name, SIZES)
