"""Tensors to safetensors bytes and back, and whether they hold a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from anytrain.engine.checkpoint import safetensors_format
from anytrain.engine.checkpoint.files import Buffer, Damaged, read_piece

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
_SMALL_BYTES = 8 << 10
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass
class TensorFile:
    """A safetensors file to be written."""

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes that the file takes, give or take its header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def chunks(self) -> Iterator[Buffer]:
        """Yield the file's bytes; a tensor on a device is fetched when its turn comes."""
        entries = [
            safetensors_format.Entry(name, CODES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]
        head, placed = safetensors_format.header(entries, self.metadata)
        yield head
        for entry in placed:
            if entry.num_bytes:
                yield to_bytes(self.tensors[entry.name])


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in C order; a plain tensor on the host is not copied."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read(data: bytearray, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a file's bytes; Damaged if it is no safetensors file.

    Each gets memory of its own, aligned as torch aligns it: some CPU kernels take another path,
    with another last bit, for data that starts at an odd address.
    """
    try:
        entries, _ = safetensors_format.parse(data)
        return {entry.name: _tensor(data, entry) for entry in entries}
    except (*safetensors_format.ODD, RuntimeError, OverflowError) as error:  # torch refuses a shape
        raise Damaged(name, f"it is not a safetensors file: {error}") from error


def outline(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, large ones with their type and shape alone."""
    held: dict[str, torch.Tensor] = {}
    try:
        for entry in safetensors_format.read_entries(folder, name):
            if entry.num_bytes > _SMALL_BYTES:
                held[entry.name] = torch.empty(
                    entry.shape, dtype=DTYPES[entry.dtype], device="meta"
                )
                continue
            data = bytearray(read_piece(folder, name, entry.start, entry.num_bytes))
            here = safetensors_format.Entry(entry.name, entry.dtype, entry.shape)
            held[entry.name] = _tensor(data, here)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise Damaged(name, f"it is not a safetensors file: {error}") from error
    return held


def shards(
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    most_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> list[TensorFile]:
    """Return the files that hold the tensors, none above `most_bytes` unless one tensor is.

    One file is `stem.safetensors`; several are `stem-00001-of-00003.safetensors` and so on.
    """
    groups: list[dict[str, torch.Tensor]] = [{}]
    room = most_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and groups[-1]:
            groups.append({})
            room = most_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    count = len(groups)
    names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = names if count > 1 else [f"{stem}.safetensors"]
    return [TensorFile(n, g, metadata or {}) for n, g in zip(names, groups, strict=True)]


def _tensor(data: bytearray, entry: safetensors_format.Entry) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.num_bytes // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
    return flat.reshape(entry.shape).clone()


_ALONE_BYTES = 1 << 20
"""Up to here one thread is done before torch's have met, the more so where other programs keep
the cores busy: 60 ms for a model of 500 KB then."""
_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


def nonfinite(
    tensors: Mapping[str, torch.Tensor], finite: Iterable[str], not_nan: Iterable[str]
) -> tuple[str, str] | None:
    """Return the first tensor that holds a NaN or an infinity it must not, and which it is.

    Each is looked at where it is, and a device's answers are read once, all together.
    """
    strict, lenient = set(finite), set(not_nan)
    asked: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        known = name in strict or name in lenient
        if known and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            asked.setdefault(tensor.device, {})[name] = _flags(tensor)
    for flags in asked.values():
        answers = torch.stack(list(flags.values())).tolist()
        for name, (has_nan, has_infinity) in zip(flags, answers, strict=True):
            if has_nan or (has_infinity and name in strict):
                return name, "NaN" if has_nan else "infinity"
    return None


def _flags(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether there is a NaN and whether there is an infinity.

    One pass, and no second tensor of the same size: a NaN anywhere is the least and the greatest.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    if plain.dtype.itemsize == 1:  # float8 has no arithmetic
        plain = plain.to(torch.float32)
    ends = _ends(plain)
    return torch.stack([ends.isnan().any(), ends.isinf().any()])


def _ends(plain: torch.Tensor) -> torch.Tensor:
    is_here = plain.device.type == "cpu" and plain.dtype in _KNOWN_TO_NUMPY
    if is_here and plain.nbytes <= _ALONE_BYTES:
        values = plain.detach().resolve_neg().numpy()
        return torch.tensor([values.min().item(), values.max().item()], dtype=torch.float64)
    return torch.stack(torch.aminmax(plain))
