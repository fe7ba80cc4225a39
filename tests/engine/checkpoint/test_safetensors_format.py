"""Our safetensors files are everyone's, and everyone's are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from anytrain.engine.checkpoint import files, safetensors_format, tensors
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.tensors import TensorFile, shards

SAMPLE = {
    "weight": torch.randn(3, 5),
    "half": torch.randn(7).half(),
    "brain": torch.randn(2, 2).bfloat16(),
    "flag": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "none": torch.empty(0, 3),
    "byte": torch.arange(5, dtype=torch.uint8),
    "wide": torch.randn(3, dtype=torch.float64),
    "ümlaut/…": torch.ones(1),
}


def _bytes(held: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytearray:
    chunks = TensorFile("x", held, metadata or {}).chunks()
    return bytearray(b"".join(bytes(chunk) for chunk in chunks))


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(_bytes(SAMPLE, {"format": "pt"}))
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert back.keys() == SAMPLE.keys()
    for name, tensor in SAMPLE.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_library_writes() -> None:
    back = tensors.read(bytearray(safetensors.torch.save(SAMPLE)), "x")
    assert back.keys() == SAMPLE.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in SAMPLE.items())


def test_each_tensor_starts_where_its_type_may_start() -> None:
    entries, _ = safetensors_format.parse(_bytes(SAMPLE))
    assert all(e.start % safetensors_format.DTYPE_BYTES[e.dtype] == 0 for e in entries)


def test_a_loaded_tensor_lies_where_torch_would_have_put_it() -> None:
    back = tensors.read(_bytes(SAMPLE), "x")
    assert all(t.data_ptr() % 16 == 0 for t in back.values())


def _with_header(contents: object, data: bytes = b"\0" * 8) -> bytearray:
    text = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def _entry(start: int = 0, stop: int = 8, dtype: str = "F32", shape: object = (2,)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        bytearray(),
        bytearray(b"\0" * 7),
        bytearray(b"\xff" * 16),
        bytearray(b"\x80\x04" + b"pickle" * 9),
        _with_header(b"not json"),
        _with_header(b"[1]"),
        _with_header(b'{"a": 1}'),
        _with_header({"a": _entry(dtype="OBJ")}),
        _with_header({"a": _entry(shape=[3])}),
        _with_header({"a": _entry(shape=[-2])}),
        _with_header({"a": _entry(shape=[True, 2])}),
        _with_header({"a": _entry(shape="2")}),
        _with_header({"a": _entry(start=-8, stop=0)}),
        _with_header({"a": _entry(0, 8), "b": _entry(0, 8)}),
        _with_header({"a": _entry(8, 16)}, b"\0" * 16),
        _with_header({"a": _entry()}, b"\0" * 9),
        _with_header({"a": _entry()}, b"\0" * 7),
        _with_header(b'{"a": %s, "a": %s}' % ((json.dumps(_entry()).encode(),) * 2)),
        _with_header(b"[" * 5000),
    ],
)
def test_a_file_that_lies_about_itself_is_damage(data: bytearray) -> None:
    with pytest.raises(Damaged):
        tensors.read(data, "x")


def test_shards_hold_everything_once_and_stay_below_the_limit() -> None:
    held = {f"t{i}": torch.zeros(size) for i, size in enumerate([10, 20, 5, 100, 1, 1])}
    made = shards("model", held, most_bytes=120)
    assert [file.name for file in made] == [
        f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)
    ]
    assert [list(file.tensors) for file in made] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert [file.name for file in shards("model", held, 10**6)] == ["model.safetensors"]
    assert [file.name for file in shards("model", {}, 10)] == ["model.safetensors"]


def test_a_header_is_read_without_the_tensors(tmp_path: Path) -> None:
    files.write_file(tmp_path / "x.safetensors", TensorFile("x", SAMPLE).chunks())
    entries = safetensors_format.read_entries(tmp_path, "x.safetensors")
    assert {entry.name: entry.shape for entry in entries} == {
        name: tuple(tensor.shape) for name, tensor in SAMPLE.items()
    }
