"""Every row of an evaluation, in bounded memory: what is too much for it lives in a file.

The files have no name (they are unlinked when they are made), so that a killed process leaves
none behind. They are written as files and only read as memory: pages that were written through
a memory map would count as this process's memory.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from anytrain.core.errors import BadInput, BadType, DiskFull, WrongOrder
from anytrain.engine.objective import IGNORED
from anytrain.engine.tree import leaves, map_tensors, put_together, take_apart

Array: TypeAlias = npt.NDArray[Any]
MOST_BYTES = 256 * 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Collected:
    """The rows of trees of tensors, batch after batch, as numpy arrays at the end.

    Rows are padded with -100 to the longest; half precision becomes float32. Beyond `most_bytes`
    they live in a file in `folder` (the system's temporary one, unless said; it may be memory).
    With `concat=False` the batches stay apart and may differ in all ways.

    >>> rows = Collected()
    >>> rows.add(torch.ones(1, 2)); rows.add(torch.ones(1, 3))
    >>> rows.result()
    array([[   1.,    1., -100.],
           [   1.,    1.,    1.]], dtype=float32)
    """

    def __init__(
        self,
        most_bytes: int = MOST_BYTES,
        folder: Path | str | None = None,
        *,
        concat: bool = True,
    ) -> None:
        self._most_bytes = most_bytes
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._concat = concat
        self._arrivals = Arrivals()
        self._num_rows: int | None = None
        """How many rows count of the batch under way; None: all."""
        self._columns: list[_Column] = []
        self._skeletons: list[Any] = []  # of every batch, or of all of them
        self._result: Any = None
        self._done = False
        self._spilled = False

    def add(self, tree: Any, num_rows: int | None = None) -> None:
        """Take one batch's rows; a device is not made to wait, and the tensors may be reused.

        Where only the first `num_rows` are wanted, the others are cut off on the host: a device
        that compiles each shape has one more to compile otherwise.
        """
        if self._done:
            raise WrongOrder(
                "Cannot add to rows whose result was taken.",
                why="the result is laid out for the rows that were there.",
                fix="collect into a new object.",
            )
        _check_leaves(tree)
        before, self._num_rows = self._num_rows, num_rows
        self._keep(self._arrivals.send(tree), before)

    def result(self) -> Any:
        """Return the tree of all rows, or the list of batches; None where nothing was added."""
        if not self._done:
            self._keep(self._arrivals.last(), self._num_rows)
            self._done = True
            self._result = self._joined() if self._concat else self._apart()
            self.close()
        return self._result

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows so far, padded; the last batch may not be among them yet."""
        return sum(column.num_bytes for column in self._columns)

    @property
    def spilled(self) -> bool:
        """Whether the rows live in files."""
        return self._spilled

    def close(self) -> None:
        """Let go of the files; arrays that `result` gave keep what they show while they live."""
        self._done = True
        for column in self._columns:
            column.close()

    def __del__(self) -> None:
        if hasattr(self, "_columns"):
            self.close()

    def _keep(self, tree: Any, num_rows: int | None) -> None:
        if tree is None:
            return
        skeleton, tensors = take_apart(tree)
        arrays = [_as_array(tensor) for tensor in tensors]
        if num_rows is not None:
            arrays = [array[:num_rows] for array in arrays]
        if not self._skeletons:
            num_columns = len(arrays) if self._concat else 1
            self._columns = [_Column(padded=self._concat) for _ in range(num_columns)]
        if not self._concat or not self._skeletons:
            self._skeletons.append(skeleton)
        if self._concat and skeleton != self._skeletons[0]:
            raise _unlike(self._skeletons[0], skeleton)
        with self._room():
            for index, array in enumerate(arrays):
                self._columns[index if self._concat else 0].append(array)
            if not self._spilled and self.num_bytes > self._most_bytes:
                self._spill()

    def _spill(self) -> None:
        self._spilled = True
        for column in self._columns:
            column.spill(self._folder)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise DiskFull(
                f"The rows of this evaluation do not fit {self._folder}: {error.strerror}.",
                why=f"they take {self.num_bytes:,} bytes, and more than {self._most_bytes:,} are "
                "not kept in memory.",
                fix="make room there or name another folder, return less from the model "
                "(preprocess_logits_for_metrics), or count batch by batch "
                "(batch_eval_metrics=True).",
            ) from error

    def _joined(self) -> Any:
        if not self._skeletons:
            return None
        with self._room():
            arrays = [column.joined() for column in self._columns]
        return put_together(self._skeletons[0], arrays)

    def _apart(self) -> Any:
        if not self._skeletons:
            return None
        pieces = iter(self._columns[0].apart())
        batches = []
        for skeleton in self._skeletons:
            num_slots = len(list(_slots(skeleton)))
            batches.append(put_together(skeleton, [next(pieces) for _ in range(num_slots)]))
        return batches


class _Column:
    """The pieces of one tensor of the tree, in memory or one after the other in a file."""

    def __init__(self, *, padded: bool) -> None:
        self._padded = padded
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[np.dtype[Any]] = []
        self._arrays: list[Array] = []
        self._file: IO[bytes] | None = None
        self._raw_bytes = 0
        self._num_rows = 0
        self._longest: tuple[int, ...] | None = None
        self._dtype: np.dtype[Any] | None = None

    def append(self, array: Array) -> None:
        shape = array.shape
        if self._padded:
            longest = shape[1:] if self._longest is None else self._longest
            if len(shape) != len(longest) + 1:
                raise _unlike(f"{len(longest) + 1} dimensions", f"{len(shape)} dimensions")
            known = array.dtype if self._dtype is None else np.result_type(self._dtype, array.dtype)
            if longest != shape[1:]:
                # Bytes and booleans widen: they cannot hold -100.
                known = np.result_type(known, np.int8)
            self._longest = tuple(map(max, longest, shape[1:]))
            self._dtype = known
        self._shapes.append(shape)
        self._dtypes.append(array.dtype)
        self._num_rows += shape[0]
        self._raw_bytes += array.nbytes
        if self._file is None:
            self._arrays.append(array)
        else:
            _write(self._file, array)

    @property
    def num_bytes(self) -> int:
        if self._longest is None or self._dtype is None:
            return self._raw_bytes
        return self._num_rows * prod(self._longest) * self._dtype.itemsize

    def spill(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(  # noqa: SIM115  # closed by close()
            dir=folder, buffering=0, prefix="anytrain-rows-"
        )
        self._arrays.reverse()
        while self._arrays:  # each is freed as soon as it is written
            _write(self._file, self._arrays.pop())

    def close(self) -> None:
        self._arrays = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def joined(self) -> Array:
        assert self._longest is not None and self._dtype is not None
        shape = (self._num_rows, *self._longest)
        if self._file is None:
            return self._joined_in_memory(shape, self._dtype)
        self._lay_out(self._file, self._longest, self._dtype)
        if self.num_bytes == 0:
            return np.empty(shape, self._dtype)
        return np.memmap(self._file, self._dtype, "r+", shape=shape)

    def _joined_in_memory(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        joined = np.empty(shape, dtype)
        start = 0
        for array in self._arrays:
            rows = joined[start : start + len(array)]
            _fill(rows, array)
            start += len(array)
        return joined

    def _lay_out(self, file: IO[bytes], longest: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Pad the pieces in their file, in place.

        From the last to the first: padded pieces are longer, so that each moves towards the end,
        into room that only pieces already moved have left.
        """
        kinds = set(zip((shape[1:] for shape in self._shapes), self._dtypes, strict=True))
        if kinds == {(longest, dtype)}:
            return
        source, target = self._raw_bytes, self.num_bytes
        for shape, held in zip(reversed(self._shapes), reversed(self._dtypes), strict=True):
            padded = np.empty((shape[0], *longest), dtype)
            source -= prod(shape) * held.itemsize
            target -= padded.nbytes
            file.seek(source)
            _fill(padded, _read(file, shape, held))
            file.seek(target)
            _write(file, padded)

    def apart(self) -> list[Array]:
        if self._file is None:
            return self._arrays
        if self._raw_bytes == 0:
            return [np.empty(s, d) for s, d in zip(self._shapes, self._dtypes, strict=True)]
        everything = np.memmap(self._file, np.uint8, "r+", shape=(self._raw_bytes,))
        pieces, start = [], 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            stop = start + prod(shape) * dtype.itemsize
            pieces.append(everything[start:stop].view(dtype).reshape(shape))
            start = stop
        return pieces


def _fill(rows: Array, values: Array) -> None:
    """Write the values to the front of every dimension, and -100 behind them."""
    if rows.shape != values.shape:
        rows[...] = IGNORED
    rows[tuple(slice(0, size) for size in values.shape)] = values


def _write(file: IO[bytes], array: Array) -> None:
    if array.nbytes == 0:
        return
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:  # an unbuffered file may take a part: the error comes with the next one
        left = left[file.write(left) :]


def _read(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    raw = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    left = raw.data
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]  # it is a raw file
        assert count, "a piece of the file is missing"
        left = left[count:]
    array: Array = raw.view(dtype).reshape(shape)
    return array


def _as_array(tensor: torch.Tensor) -> Array:
    """Return a host tensor's values; numpy has no bfloat16, and halves are too short to add."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    return np.atleast_1d(tensor.numpy())


def _slots(skeleton: Any) -> Iterator[Any]:
    return (leaf for leaf in leaves(skeleton) if leaf is not None)


def _check_leaves(tree: Any) -> None:
    for leaf in leaves(tree):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise BadType(
                f"Cannot collect a {type(leaf).__name__} from an evaluation.",
                why="rows are collected from tensors, and lists, tuples and dicts of tensors.",
                fix="leave it out of the model's outputs, or name its key in ignore_keys.",
            )


def _unlike(first: Any, other: Any) -> BadInput:
    return BadInput(
        "Cannot join the outputs of two batches: they are built differently.",
        why=f"one holds {first}, a later one {other}.",
        fix="return the same for every batch, or pass eval_do_concat_batches=False.",
    )


class Arrivals:
    """Hands out, on the host, the tree that was sent before the one being sent now.

    By then the device has been given the next batch: it works while the host reads.
    """

    def __init__(self) -> None:
        self._under_way: _Copy | None = None

    def send(self, tree: Any) -> Any:
        """Start copying the tree and return the one before it; None for the first.

        The tree's tensors may be overwritten in place afterwards.
        """
        before, self._under_way = self._under_way, _Copy(tree)
        return None if before is None else before.wait()

    def last(self) -> Any:
        """Return the tree that was sent last; None where it was handed out already."""
        before, self._under_way = self._under_way, None
        return None if before is None else before.wait()


class _Copy:
    """A tree on its way to the host."""

    def __init__(self, tree: Any) -> None:
        self._events: dict[torch.device, torch.Event] = {}
        self._tree = map_tensors(self._start, tree)
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))

    def _start(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not tensor.is_cuda:
            # The CPU's copy is made here. Elsewhere a copy without waiting may come back before
            # it is written, and nothing tells: those are cloned where they are, and read later.
            return tensor.clone()
        self._events.setdefault(tensor.device, torch.Event(tensor.device))
        return tensor.to("cpu", non_blocking=True)  # into pinned memory

    def wait(self) -> Any:
        for event in self._events.values():
            event.synchronize()
        if not self._events:
            return map_tensors(torch.Tensor.cpu, self._tree)
        return map_tensors(torch.clone, self._tree)  # pinned buffers serve the next batch
