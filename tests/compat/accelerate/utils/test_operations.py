"""HF's functions over nested data."""

from __future__ import annotations

import pickle
from collections import UserDict, namedtuple

import pytest
import torch
from accelerate.utils import operations as theirs
from torch import nn

from anytrain.compat.accelerate import PartialState
from anytrain.compat.accelerate.utils import operations
from anytrain.core.errors import BadInput, BadType
from launching import launch

Pair = namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def _alone() -> None:
    PartialState(cpu=True)


@pytest.mark.parametrize(
    "data",
    [
        (torch.ones(2), [torch.ones(2), 1]),
        {"a": torch.ones(2), "b": "text"},
        UserDict({"a": torch.ones(2)}),
        Pair(torch.ones(2), [torch.ones(2)]),
    ],
)
def test_a_container_keeps_its_type_on_the_way_to_a_device(data: object) -> None:
    moved = operations.send_to_device(data, torch.device("cpu"))
    assert type(moved) is type(data)
    assert str(moved) == str(data)


def test_values_under_skipped_keys_stay_where_they_are() -> None:
    given = {"a": torch.ones(1), "b": torch.ones(1)}
    moved = operations.send_to_device(given, "meta", skip_keys="b")
    assert (moved["a"].is_meta, moved["b"].is_meta) == (True, False)


def test_an_object_with_its_own_way_to_a_device_goes_it() -> None:
    class Batch:
        def to(self, device):
            return f"on {device}"

    assert operations.send_to_device(Batch(), "cpu") == "on cpu"


def test_a_function_is_applied_to_the_leaves_that_pass_a_test() -> None:
    data = {"a": [1, "x"], "b": Pair(2, 3)}
    doubled = operations.recursively_apply(
        lambda n, by: n * by, data, 2, test_type=lambda leaf: isinstance(leaf, int)
    )
    assert doubled == {"a": [2, "x"], "b": Pair(4, 6)}
    with pytest.raises(BadType, match="int"):
        operations.recursively_apply(torch.neg, [torch.ones(1), 1], error_on_other_type=True)


def test_a_structure_can_be_sent_ahead_of_its_values() -> None:
    data = {"ids": torch.ones(2, 3, dtype=torch.int64)}
    told = operations.get_data_structure(data)
    assert operations.is_tensor_information(told["ids"])
    empty = operations.initialize_tensors(told)["ids"]
    assert (empty.shape, empty.dtype) == ((2, 3), torch.int64)
    assert operations.get_shape(data) == {"ids": [2, 3]}


def test_the_batch_size_and_device_are_those_of_the_first_tensor() -> None:
    data = ["x", {"a": torch.ones(3, 2)}]
    assert operations.find_batch_size(data) == operations.ignorant_find_batch_size(data) == 3
    assert operations.find_device(data) == torch.device("cpu")
    assert operations.ignorant_find_batch_size(["x"]) is operations.find_device(["x"]) is None
    with pytest.raises(BadInput, match="batch size"):
        operations.find_batch_size(["x"])


def test_tensors_become_lists() -> None:
    data = {"a": torch.tensor([[1, 2]]), "b": torch.tensor([0.5], dtype=torch.bfloat16)}
    assert operations.listify(data) == {"a": [[1, 2]], "b": [0.5]}


def test_batches_are_cut_and_joined() -> None:
    batch = {"x": torch.arange(4), "y": [torch.arange(4)]}
    parts = [operations.slice_tensors(batch, slice(i, i + 2)) for i in (0, 2)]
    joined = operations.concatenate(parts)
    assert joined["x"].tolist() == joined["y"][0].tolist() == [0, 1, 2, 3]
    assert operations.concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="other things"):
        operations.concatenate([{"c": "a"}, {"c": "b"}])


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 8, 9, 16, 17])
def test_a_batch_is_filled_with_zeros_to_the_length_that_hf_gives_it(
    rows: int, num_processes: int
) -> None:
    batch = {"x": torch.ones(rows, 2), "y": [torch.ones(rows, dtype=torch.int64)]}
    expected = theirs.pad_input_tensors(batch, rows, num_processes)
    filled = operations.pad_input_tensors(batch, rows, num_processes)
    assert torch.equal(filled["x"], expected["x"])
    assert torch.equal(filled["y"][0], expected["y"][0])


def test_a_batch_is_filled_along_another_dimension_and_of_tensors_alone() -> None:
    filled = operations.pad_input_tensors(torch.ones(2, 3), 3, 4, dim=1)
    assert filled.tolist() == [[1, 1, 1, 0]] * 2
    with pytest.raises(TypeError, match="Unsupported types"):
        operations.pad_input_tensors({"x": "words"}, 1, 2)


def test_half_precision_is_widened() -> None:
    narrow = {"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(1, dtype=torch.int8)}
    wide = operations.convert_to_fp32(narrow)
    assert (wide["a"].dtype, wide["b"].dtype) == (torch.float32, torch.int8)
    layer = nn.Linear(1, 1).bfloat16()
    forward = operations.convert_outputs_to_fp32(layer.forward)
    assert forward(torch.ones(1, 1, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(BadInput, match="unwrap"):
        pickle.dumps(operations.ConvertOutputsToFp32(layer.forward))


def test_alone_what_is_gathered_is_what_was_given() -> None:
    tensor = torch.tensor(3.0)
    assert operations.gather(tensor) is tensor
    assert operations.gather_object(["a"]) == ["a"]
    assert operations.reduce(torch.tensor(3)).item() == 3
    assert operations.broadcast(tensor).item() == 3.0
    assert operations.copy_tensor_to_devices(tensor).item() == 3.0
    assert operations.broadcast_object_list([1, "x"]) == [1, "x"]
    with operations.GatheredParameters([tensor]):
        pass


def test_a_nested_tensor_is_not_padded_and_that_is_said() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)])
    with pytest.warns(operations.CannotPadNestedTensorWarning):
        assert operations.pad_across_processes(nested) is nested


def test_two_ranks_agree_or_are_told_how_they_differ() -> None:
    script = """
    import torch
    from anytrain.compat.accelerate.state import PartialState
    from anytrain.compat.accelerate.utils import operations as ops
    state = PartialState()
    rank = state.process_index
    one = torch.arange(2.0) + rank
    assert ops.gather({"a": one})["a"].tolist() == [0.0, 1.0, 1.0, 2.0]
    assert ops.reduce(one, "max").tolist() == [1.0, 2.0]
    assert ops.broadcast(one, from_process=1).tolist() == [1.0, 2.0]
    assert ops.broadcast_object_list([rank], from_process=1) == [1]
    alone = torch.ones(2, 3, dtype=torch.int16) if rank == 1 else None
    assert ops.copy_tensor_to_devices(alone).tolist() == [[1, 1, 1], [1, 1, 1]]
    state.debug = True

    @ops.chained_operation
    @ops.verify_operation
    def sum_up(tensor):
        return ops.reduce(tensor, "sum")

    for call in (ops.gather, ops.reduce, ops.broadcast, sum_up):
        try:
            call(torch.ones(1 + rank))
        except ops.DistributedOperationException as error:
            assert "rank 0" in str(error) and "rank 1" in str(error), error
        else:
            raise AssertionError(call)
    try:
        ops.pad_across_processes(torch.ones([1] * (1 + rank)))
    except ops.DistributedOperationException as error:
        print("told")
    """
    assert launch(script, 2, env={"ANYTRAIN_DEVICE": "cpu"}).stdout.count("told") == 2
