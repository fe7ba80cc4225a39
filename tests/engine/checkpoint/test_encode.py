"""A state survives the trip to a document and tensors, value by value and bit by bit."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import pathlib
import random
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import tensors
from anytrain.engine.checkpoint.encode import check, decode, encode, from_json, to_json
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.tensors import TensorFile


def through_bytes(state: Any) -> Any:
    """Go the whole way: document to JSON bytes, tensors to safetensors bytes, and back."""
    encoded = encode(state)
    document = from_json(to_json(encoded.document), "x.json")
    raw = b"".join(bytes(chunk) for chunk in TensorFile("x", encoded.tensors).chunks())
    return decode(document, tensors.read(bytearray(raw), "x"))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bytes(tensors.to_bytes(one) if one.numel() else b"") == bytes(
            tensors.to_bytes(other) if other.numel() else b""
        )
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype
        assert np.asarray(one).shape == np.asarray(other).shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(map(repr, one)) == list(map(repr, other))
        for left, right in zip(one.values(), other.values(), strict=True):
            assert_same(left, right)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, float | complex):
        bits = struct.Struct(">dd")
        assert bits.pack(one.real, one.imag) == bits.pack(other.real, other.imag)
    else:
        assert one == other


PLAIN = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**5000,
    -(10**5000),
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "",
    "naïve \ud800 \0 \n ~",
    b"",
    bytes(range(256)),
    bytearray(b"ab\0"),
    complex(math.nan, -0.0),
    (),
    (1, (2.0, "x")),
    [],
    [1, [2, (3,)]],
    set(),
    {1, "a", (2, 3), None},
    frozenset({1.5, b"x"}),
    {},
    {"a": 1, "~": 2},
    {1: "int", "1": "str", (1, 2): "tuple", None: 0, 2.5: 1, b"k": 2, frozenset({1}): 3},
    torch.Size([2, 0, 3]),
    torch.bfloat16,
    torch.device("cuda", 3),
    pathlib.Path("a/b"),
    datetime.timedelta(days=-1, microseconds=7),
    range(3, 30, 7),
    np.float64(0.1),
    np.float32("nan"),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("häh"),
    np.str_(""),
    np.datetime64("2026-01-02T03:04:05", "ns"),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back_as_it_was(value: Any) -> None:
    assert_same(through_bytes(value), value)


# uint1 to uint7 and their like are names that no tensor can be made of.
_NAMES_ONLY = ("torch.q", "torch.bits", "torch.int", "torch.uint")
DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
DTYPES = [d for d in dict.fromkeys(DTYPES) if not str(d).startswith(_NAMES_ONLY)]
WHOLE = [
    *DTYPES,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_comes_back(dtype: torch.dtype, shape: Any) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert_same(through_bytes({"t": tensor})["t"], tensor.clone())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(7.5),
        np.zeros((0, 4), dtype=np.float16),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array([b"x\0y", b""]),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_numpy_array_comes_back_as_it_was(array: np.ndarray) -> None:
    back = through_bytes([array])[0]
    assert_same(back, np.ascontiguousarray(array).reshape(array.shape))
    assert back.flags.writeable


def test_views_that_are_not_contiguous_come_back_as_their_values() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    back = through_bytes(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor)


def test_two_places_that_hold_one_tensor_hold_one_again() -> None:
    tensor, other = torch.ones(3), torch.ones(3)
    state = {"a": tensor, "b": [tensor, tensor.detach()], "c": other, "d": tensor[:2]}
    assert len(encode(state).tensors) == 3
    back = through_bytes(state)
    assert back["a"] is back["b"][0]
    assert back["a"] is back["b"][1]
    assert back["a"] is not back["c"]
    back["a"].zero_()
    assert back["c"].sum() == 3


def test_tensors_are_named_by_their_path_and_never_collide() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.ones(2)}
    names = set(encode(state).tensors)
    assert "a.b" in names
    assert len(names) == 3
    assert_same(through_bytes(state), state)


class Point(NamedTuple):
    x: int
    y: torch.Tensor


def test_kinds_of_dict_and_deques_are_what_they_were() -> None:
    state = [
        collections.OrderedDict({"b": 1, "a": torch.ones(1)}),
        collections.defaultdict(list, b=[2]),
        collections.defaultdict(None, {3: "x"}),
        collections.Counter("aab"),
        collections.deque([1, (2, 3)], maxlen=4),
    ]
    back = through_bytes(state)
    assert [type(item) for item in back] == [type(item) for item in state]
    assert back[1:] == state[1:] and list(back[0]) == ["b", "a"]
    assert (back[1].default_factory, back[2].default_factory) == (list, None)
    assert back[4].maxlen == 4
    back[1]["new"].append(1)


def test_named_tuples_and_dicts_with_a_default_of_ones_own_become_plain_ones() -> None:
    default: dict[str, int] = collections.defaultdict(lambda: 7, b=2)
    back = through_bytes([Point(1, torch.ones(1)), default])
    assert [type(item) for item in back] == [tuple, dict]
    assert back[1] == {"b": 2}


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Attributes(dict):
    pass


def _itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(500):
        found = [found]
    return found


REFUSED = [
    (len, "builtin_function_or_method"),
    (lambda step: step, "function"),
    (Colour.RED, "Colour"),
    (Level.LOW, "Level"),
    (Attributes(a=1), "Attributes"),
    (object(), "object"),
    (torch.nn.Linear(1, 1), "Linear"),
    (torch.Generator(), "Generator"),
    (torch.eye(2).to_sparse(), "sparse"),
    (torch.empty(2, device="meta"), "meta"),
    (np.array([object()]), "numpy array of object"),
    (np.ma.masked_array([1]), "MaskedArray"),
    (np.zeros(2, dtype=[("a", "i4")]), "numpy array"),
    ({torch.ones(1): 1}, "Tensor as its key"),
    (_itself(), "contains itself"),
    (_deep(), "nested"),
    (datetime.datetime(2026, 1, 1), "datetime"),
]


@pytest.mark.parametrize(("value", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_no_file_can_hold_is_refused_with_its_path(value: Any, word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check({"lr_lambdas": [0, {"x": (value,)}]}, "scheduler")
    assert "scheduler['lr_lambdas'][1]['x'][0]" in caught.value.what
    assert word in caught.value.what


def test_a_scheduler_with_a_function_is_refused_by_its_own_path() -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\['lr_lambdas'\]\[0\]: function"):
        check({"lr_lambdas": [lambda step: 1.0]}, "scheduler")


def _random_state(rng: random.Random, depth: int = 0) -> Any:
    leaves = [
        lambda: rng.choice(PLAIN),
        lambda: rng.getrandbits(rng.randrange(1, 200)) - 2**99,
        lambda: struct.unpack(">d", rng.randbytes(8))[0],
        lambda: "".join(chr(rng.randrange(0xD7FF)) for _ in range(rng.randrange(9))),
        lambda: torch.from_numpy(np.frombuffer(rng.randbytes(12), np.uint8).copy()),
        lambda: np.frombuffer(rng.randbytes(16), np.dtype(rng.choice(["<f4", ">i8", "u2"]))),
    ]
    if depth == 4 or rng.random() < 0.4:
        return rng.choice(leaves)()
    children = [_random_state(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [rng.choice([f"k{i}", i, (i, "x"), i + 0.5]) for i in range(len(children))]
    return rng.choice([list, tuple, lambda c: dict(zip(keys, c, strict=True))])(children)


@pytest.mark.parametrize("seed", range(150))
def test_random_states_come_back_as_they_were(seed: int) -> None:
    state = _random_state(random.Random(seed))
    assert_same(through_bytes(state), state)


@pytest.mark.parametrize(
    "document",
    [
        {"~": "os.system", "value": "true"},
        {"~": "__reduce__", "items": []},
        {"~": "tensor", "name": "not there"},
        {"~": "tensor", "name": "t", "dtype": "no such", "shape": [1]},
        {"~": "tensor", "name": "t", "dtype": "complex128", "shape": [7]},
        {"~": "array", "name": "t", "dtype": "O", "shape": [1]},
        {"~": "array", "name": "t", "dtype": "<f4", "shape": [99]},
        {"~": "scalar", "dtype": "V8", "value": "AAAAAAAAAAA="},
        {"~": "dict", "items": [[[], 1]]},
        {"~": "dict", "items": 5},
        {"~": "dtype", "value": "nn"},
        {"~": "device", "value": "rm -rf"},
        {"~": "bytes", "value": 3},
        {"~": ["tuple"]},
    ],
    ids=json.dumps,
)
def test_a_document_without_meaning_is_damage_and_nothing_else(document: Any) -> None:
    with pytest.raises(Damaged):
        decode(document, {"t": torch.zeros(4, dtype=torch.uint8)})


def test_a_document_too_deep_to_read_is_damage() -> None:
    with pytest.raises(Damaged):
        from_json(b"[" * 100_000, "x.json")
