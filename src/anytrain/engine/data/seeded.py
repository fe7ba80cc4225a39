"""Randomness in the data as a function of seed, epoch and index.

Shuffling, a dataset's augmentation and a collator's masking draw the same values whoever loads
them: one process or several workers, in one go or after a resume. Only what surely draws nothing is
left unseeded: code that its bytecode shows to pick and stack, by names and methods that are known.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from anytrain.core import bytecode
from anytrain.core.errors import add_to_message
from anytrain.engine.data.collate import collate as stacked
from anytrain.engine.data.columns import DropColumns, Table
from anytrain.engine.data.padding import ToBuckets, WithoutFullMask
from anytrain.engine.data.position import LaidOut

_MASK = 2**64 - 1
_CONTAINERS = (TensorDataset, torch.Tensor, list, tuple, range, np.ndarray)
_COLLATORS = {
    ("transformers.data.data_collator", name)
    for name in (
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
        "DataCollatorWithPadding",
        "DefaultDataCollator",
        "default_data_collator",
    )
}
"""Other libraries' that stack and pad, and draw nothing."""
_MOST_NAMED = 8
_REMEMBERED = 10_000  # batches whose samples can be named after something went wrong


class SeedableRandomSampler(LaidOut, RandomSampler):
    """A random sampler whose order depends on the seed and the epoch alone.

    An epoch that was begun under another seed ends in the order that it began with.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @property
    def layout(self) -> Mapping[str, Any]:  # type: ignore[override]  # it may be set between epochs
        """What, with the epoch, decides the order."""
        return {"seed": self.initial_seed}

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.order_layout()["seed"])
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


class SeededIndex(NamedTuple):
    """A sample to load, and the seed of whatever is drawn while loading it."""

    index: Any
    seed: int


class DealtBatch(NamedTuple):
    """Which samples a batch was made of, and when."""

    epoch: int
    number: int
    """Its number in the epoch, from 0."""
    samples: list[Any]
    key: int
    """What the seeds of its samples were drawn from."""


class SeededBatchSampler(BatchSampler):
    """A batch sampler's batches, remembered; each sample with its seed where it may draw."""

    def __init__(self, batch_sampler: Any, *, seeds: bool = True) -> None:
        self.batch_sampler = batch_sampler
        self._seeds = seeds
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # None where batches vary
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._key = self._first = self._epoch = 0
        self._dealt: deque[DealtBatch] = deque(maxlen=_REMEMBERED)

    def begin(self, seed: int, epoch: int) -> None:
        """Draw the next epoch's seeds from these."""
        self._key, self._epoch = mix(mix(0, seed), epoch), epoch
        while self._dealt and self._dealt[-1].epoch >= epoch:  # a walk that was left early
            self._dealt.pop()

    def dealt(self, number: int) -> list[Any] | None:
        """Return the samples of the epoch's batch of that number, if it is remembered."""
        mine = (each for each in reversed(self._dealt) if each.epoch == self._epoch)
        return next((each.samples for each in mine if each.number == number), None)

    @property
    def newest(self) -> int:
        """The number of the epoch's batch that was dealt last; -1 before the first."""
        newest = self._dealt[-1] if self._dealt else None
        return -1 if newest is None or newest.epoch != self._epoch else newest.number

    def known(self) -> list[DealtBatch]:
        """Return the last batches, the oldest first; those of earlier epochs are among them."""
        return list(self._dealt)

    def draw(self, batch: list[Any], key: int | None = None) -> list[Any]:
        """Return a batch's samples with their seeds; without, where nothing is drawn.

        It is one of this epoch, or of the one whose `key` is given.
        """
        if not self._seeds:
            return batch
        key = self._key if key is None else key
        return [SeededIndex(index, mix(key, _number(index))) for index in batch]

    def of(self, batch_sampler: Any, first: int) -> SeededBatchSampler:
        """Return one of the same epoch for another dealing, whose batches count from there."""
        others = SeededBatchSampler(batch_sampler, seeds=self._seeds)
        others._key, others._epoch = self._key, self._epoch
        others._dealt, others._first = self._dealt, first
        return others

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        dealt, draw = self._dealt.append, self.draw if self._seeds else None
        for number, batch in enumerate(self.batch_sampler, self._first):
            dealt(DealtBatch(self._epoch, number, list(batch), self._key))
            yield batch if draw is None else draw(batch)


class SeededSamples(list[Any]):
    """Samples on their way to the collator, with its seed and the generators to put back."""

    seed: int = 0
    before: Any = None


class SeededDataset:
    """A map-style dataset that loads each sample under its own seed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not yet set: an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, seeded: list[SeededIndex]) -> SeededSamples:
        drawn = SeededSamples()
        drawn.seed = seeded[0].seed if seeded else 0
        # A worker's generators are its own; the main process's are also the model's.
        drawn.before = hold() if get_worker_info() is None else None
        try:
            if hasattr(self.dataset, "__getitems__") and seeded:
                seed_all(seeded[0].seed)  # the dataset loads a batch at once, under one seed
                drawn.extend(self.dataset.__getitems__([each.index for each in seeded]))
                return drawn
            for each in seeded:
                seed_all(each.seed)
                drawn.append(self._sample(each.index))
        except BaseException:
            put_back(drawn.before)
            raise
        return drawn

    def _sample(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except StopIteration as error:  # the loader would take it for the end of the data
            raise RuntimeError(
                f"The data set raised StopIteration for sample {index!r}: an iterator that it "
                "reads from has come to its end."
            ) from error
        except Exception as error:
            add_to_message(error, f"Raised by the data set, for sample {index!r}.")
            raise


class SeededCollate:
    """A collator that draws under a seed of its batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, drawn: SeededSamples) -> Any:
        """Return the batch, and put back the generators that loading it borrowed."""
        try:
            seed_all(mix(drawn.seed, 1))
            return self.collate(list(drawn))
        finally:
            put_back(drawn.before)


def listed(samples: Sequence[Any]) -> str:
    """Name the first few of these samples.

    >>> listed([3, 1]), listed(range(20))
    ('samples 3, 1', 'samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(str(each) for each in samples[:_MOST_NAMED])
    more = f" and {len(samples) - _MOST_NAMED} more" if len(samples) > _MOST_NAMED else ""
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{more}"


def load(dataset: Any, collate: Callable[[list[Any]], Any], drawn: list[Any]) -> Any:
    """Return the batch of these samples or seeded indices, as a loader without workers does."""
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(drawn))
    return collate([dataset[index] for index in drawn])


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Whether loading is known to draw no random number: plain containers, plain collating.

    Whoever says `draws_nothing = True` of itself is believed.
    """
    return _collates_plainly(collate) and _is_plain(dataset)


def _is_plain(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _is_plain(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(_is_plain(part) for part in dataset.datasets)
    if type(dataset) is Table:
        return all(_is_plain(column) for column in dataset.columns.values())
    if type(dataset).__module__ == "datasets.arrow_dataset":  # its transform may draw
        return bool(dataset.format["type"] != "custom")
    if type(dataset) in _CONTAINERS or getattr(dataset, "draws_nothing", False) is True:
        return True
    ways = [getattr(dataset, name, None) for name in ("__getitem__", "__getitems__")]
    found = [way for way in ways if way is not None]
    return bool(found) and all(function_draws_nothing(way, dataset) for way in found)


def _collates_plainly(collate: Any) -> bool:
    while type(collate) in (
        DropColumns,
        ToBuckets,
        WithoutFullMask,
    ):  # they add nothing that is drawn
        collate = collate.collate
    if collate in (default_collate, stacked):
        return True
    kind: Any = collate if isinstance(collate, FunctionType) else type(collate)
    is_known = (kind.__module__, kind.__qualname__) in _COLLATORS
    said = getattr(collate, "draws_nothing", False) is True
    return is_known or said or function_draws_nothing(collate)


def mix(key: int, value: int) -> int:
    """Return a number that changes entirely when either argument does (splitmix64's finish).

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    word = (key * 0x9E3779B97F4A7C15 + value + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _number(index: Any) -> int:
    """Return an index as a number; a key that is none stands for the bytes of its text."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return int.from_bytes(repr(index).encode()[-8:], "little")


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch's CPU generator (torch.manual_seed costs 20 times more)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


_spare: list[Any] = []  # numpy generators to lend; making one costs 80 us


def hold() -> Any:
    """Take the process's generators aside; numpy's is swapped, copying it costs 80 us."""
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stubs
    lent = _spare.pop() if _spare else np.random.MT19937(0)
    np.random.set_bit_generator(lent)  # type: ignore[attr-defined]  # likewise
    return random.getstate(), numpy, torch.default_generator.get_state()


def put_back(before: Any) -> None:
    """Put back what `hold` took aside."""
    if before is not None:
        python, numpy, state = before
        random.setstate(python)
        _spare[:] = [np.random.get_bit_generator()]  # type: ignore[attr-defined]  # not in the stubs
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]  # likewise
        torch.default_generator.set_state(state)


_DEPTH = 3  # of functions that functions call
_MODULES = (torch, np, math, operator, torch.nn.functional)
_DATA = (torch.Tensor, np.ndarray, list, tuple, dict, str, bytes, int, float, bool, range)
_BUILTIN_NAMES = """
len range zip max min int float str list dict tuple set enumerate sum sorted isinstance bool abs
round map filter all any slice reversed
"""
_METHOD_NAMES = """
keys values items get append extend pop copy update index count join split strip lower to float long
int half double bool cpu numpy tolist item view reshape size shape dim ndim unsqueeze squeeze
transpose permute contiguous flatten expand clone detach type astype dtype device T sum mean max min
any all pad setdefault clamp abs masked_fill fill_ copy_ narrow chunk new_zeros new_ones new_full
new_tensor
"""
_DRAWING_WORDS = """
rand shuffle choice sample normal uniform bernoulli dropout multinomial permutation seed generator
poisson exponential cauchy
"""
_BUILTINS = frozenset(getattr(builtins, name) for name in _BUILTIN_NAMES.split())
_METHODS = frozenset(_METHOD_NAMES.split())
_DRAWING = tuple(_DRAWING_WORDS.split())


def function_draws_nothing(function: Any, owner: Any = None, depth: int = _DEPTH) -> bool:
    """Whether a function, or a method of `owner`, surely draws no random number."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or depth == 0:
        return False
    around = bytecode.enclosed(function)
    return all(
        _is_safe(step, before, function, around, owner, depth)
        for before, step in bytecode.steps(function)
    )


def _is_safe(
    step: dis.Instruction,
    before: dis.Instruction | None,
    function: types.FunctionType,
    around: dict[str, Any],
    owner: Any,
    depth: int,
) -> bool:
    name = str(step.argval)
    if step.opname.startswith("IMPORT") or step.opname == "LOAD_BUILD_CLASS":
        return False
    if bytecode.is_global(step):
        value = function.__globals__.get(name, getattr(builtins, name, None))
        return _is_known(value, depth)
    if step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in function.__code__.co_freevars:
        return name in around and _is_known(around[name], depth)
    if bytecode.is_attribute(step):
        return _is_safe_attribute(name, before, function, owner, depth)
    return True


def _is_safe_attribute(
    name: str,
    before: dis.Instruction | None,
    function: types.FunctionType,
    owner: Any,
    depth: int,
) -> bool:
    if any(word in name for word in _DRAWING):
        return False
    first = function.__code__.co_varnames[:1]
    if owner is not None and before is not None and bytecode.loads(before, first):
        found = getattr(type(owner), name, None)
        if isinstance(found, types.FunctionType):
            return function_draws_nothing(found, owner, depth - 1)
        return not isinstance(found, property) and _is_data(getattr(owner, name, None))
    if before is not None and before.opname == "LOAD_GLOBAL":
        value = function.__globals__.get(str(before.argval))
        if any(value is module for module in _MODULES):
            return not isinstance(getattr(value, name, None), types.ModuleType)
    return name in _METHODS


def _is_known(value: Any, depth: int) -> bool:
    if any(value is module for module in _MODULES) or _is_data(value):
        return True
    if isinstance(value, types.FunctionType):
        return _is_torchs(value) or function_draws_nothing(value, None, depth - 1)
    return isinstance(value, (type, types.BuiltinFunctionType)) and value in _BUILTINS


def _is_torchs(function: types.FunctionType) -> bool:
    """Whether it is a function of torch's or numpy's whose name does not speak of drawing."""
    ours = function.__module__.split(".")[0] in ("torch", "numpy")
    return ours and not any(word in function.__name__ for word in _DRAWING)


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, torch.dtype) or type(value) in _DATA
