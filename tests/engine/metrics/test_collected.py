"""Rows are collected whole and in order, in memory or in a file."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections import namedtuple

import numpy as np
import psutil
import pytest
import torch

from anytrain.core.errors import BadInput, BadType, DiskFull, WrongOrder
from anytrain.engine.metrics import Collected
from launching import run_script


@pytest.fixture(params=[2**28, 0], ids=["in memory", "in a file"])
def collected(request, tmp_path):
    return lambda **options: Collected(request.param, tmp_path, **options)


def filled(collected: Collected, *trees):
    for tree in trees:
        collected.add(tree)
    return collected.result()


def test_rows_come_back_in_order(collected) -> None:
    rows = torch.arange(30.0).reshape(10, 3)
    result = filled(collected(), rows[:4], rows[4:8], rows[8:])
    assert result.dtype == np.float32
    assert np.array_equal(result, rows.numpy())


def test_rows_that_only_fill_a_batch_up_are_cut_off_on_the_host(collected) -> None:
    rows = torch.arange(24.0).reshape(8, 3)
    kept = collected()
    kept.add({"a": rows[:4], "b": rows[:4, 0]})
    kept.add({"a": rows[4:], "b": rows[4:, 0]}, 2)
    result = kept.result()
    assert np.array_equal(result["a"], rows[:6].numpy())
    assert np.array_equal(result["b"], rows[:6, 0].numpy())


def test_trees_keep_their_shape(collected) -> None:
    Point = namedtuple("Point", "x y")
    tree = {"a": (torch.ones(2, 3), None), "b": [Point(torch.zeros(2), torch.ones(2, 1, 4))]}
    result = filled(collected(), tree, tree)
    assert result["a"][0].shape == (4, 3) and result["a"][1] is None
    assert isinstance(result["b"][0], Point)
    assert result["b"][0].x.shape == (4,) and result["b"][0].y.shape == (4, 1, 4)


def test_a_models_output_keeps_its_class(collected) -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    result = filled(collected(), *[SequenceClassifierOutput(logits=torch.ones(2, 3))] * 2)
    assert isinstance(result, SequenceClassifierOutput)
    assert result.logits.shape == (4, 3) and result.loss is None


def test_unlike_lengths_are_padded_as_transformers_does(collected) -> None:
    from transformers.trainer_pt_utils import EvalLoopContainer

    theirs, batches = EvalLoopContainer(), []
    for rows, length in [(2, 5), (3, 9), (1, 2), (2, 9)]:
        batches.append((torch.randn(rows, length, 2), torch.randint(9, (rows, length))))
        theirs.add(batches[-1])
    logits, labels = filled(collected(), *batches)
    expected = theirs.get_arrays()
    assert np.array_equal(logits, expected[0]) and np.array_equal(labels, expected[1])
    assert (logits.dtype, labels.dtype) == (np.float32, np.int64)


def test_every_dimension_is_padded(collected) -> None:
    result = filled(collected(), torch.ones(1, 2, 3), torch.ones(1, 3, 2))
    assert result.shape == (2, 3, 3)
    assert result[0].tolist() == [[1, 1, 1], [1, 1, 1], [-100] * 3]
    assert result[1].tolist() == [[1, 1, -100]] * 3


def test_half_precision_becomes_float32(collected) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        result = filled(collected(), torch.tensor([[1.5]], dtype=dtype))
        assert result.dtype == np.float32 and result.tolist() == [[1.5]]


def test_bytes_and_booleans_widen_to_hold_the_padding(collected) -> None:
    for dtype, wide in ((torch.bool, np.int8), (torch.uint8, np.int16)):
        result = filled(collected(), torch.ones(1, 1, dtype=dtype), torch.ones(1, 2, dtype=dtype))
        assert result.dtype == wide
        assert result.tolist() == [[1, -100], [1, 1]]
        assert filled(collected(), torch.ones(1, 1, dtype=dtype)).dtype.itemsize == 1


def test_kinds_of_numbers_meet_in_one_that_holds_both(collected) -> None:
    result = filled(collected(), torch.tensor([1]), torch.tensor([0.5]))
    assert result.dtype == np.float64 and result.tolist() == [1.0, 0.5]


def test_scalars_are_rows_of_one_and_no_rows_are_none(collected) -> None:
    result = filled(collected(), torch.tensor(1.0), torch.tensor(2.0), torch.zeros(0))
    assert result.tolist() == [1.0, 2.0]
    assert filled(collected(), torch.zeros(0, 4)).shape == (0, 4)


def test_nothing_collected_is_none(collected) -> None:
    assert filled(collected()) is None
    assert filled(collected(), None, None) is None
    assert filled(collected(concat=False)) is None


def test_what_is_overwritten_afterwards_was_collected_as_it_was(collected) -> None:
    rows, buffer = collected(), torch.zeros(2)
    for value in (1.0, 2.0, 3.0):
        buffer.fill_(value)
        rows.add(buffer)
    buffer.fill_(9)
    assert rows.result().tolist() == [1, 1, 2, 2, 3, 3]


def test_batches_stay_apart_when_asked(collected) -> None:
    batches = [(torch.ones(2, 3), None), (torch.zeros(1, 5).bfloat16(), torch.tensor([7]))]
    first, second = filled(collected(concat=False), *batches)
    assert first[0].shape == (2, 3) and first[1] is None
    assert second[0].shape == (1, 5) and second[0].dtype == np.float32
    assert second[1].tolist() == [7]
    assert filled(collected(concat=False), torch.zeros(0, 2))[0].shape == (0, 2)


def test_the_result_can_be_written_to(collected) -> None:
    result = filled(collected(), torch.ones(1, 2), torch.ones(1, 3))
    result[result == -100] = 0
    assert result.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_rows_move_to_a_file_when_they_are_too_many(tmp_path) -> None:
    rows = Collected(100, tmp_path)
    rows.add(torch.arange(10))
    rows.add(torch.arange(10, 20))
    assert not rows.spilled  # 80 bytes; the last batch is still on its way
    rows.add(torch.arange(20, 30))
    assert rows.spilled and rows.num_bytes == 160
    result = rows.result()
    assert isinstance(result, np.memmap)
    assert result.tolist() == list(range(30))


def test_padding_that_would_be_too_much_is_made_in_a_file(tmp_path) -> None:
    rows = Collected(10_000, tmp_path)
    rows.add(torch.zeros(100, 1))
    rows.add(torch.ones(1, 1000))
    result = rows.result()
    assert isinstance(result, np.memmap) and result.shape == (101, 1000)
    assert (result[:100, 0] == 0).all() and (result[:100, 1:] == -100).all()
    assert (result[100] == 1).all()


def test_files_have_no_name_and_go_with_their_last_reader(tmp_path) -> None:
    rows = Collected(0, tmp_path)
    rows.add({"a": torch.ones(4), "b": torch.ones(4)})
    rows.add({"a": torch.ones(4), "b": torch.ones(4)})
    assert rows.spilled and not any(tmp_path.iterdir())
    open_files = psutil.Process().num_fds()
    result = rows.result()
    rows.close()
    assert psutil.Process().num_fds() <= open_files
    assert result["a"].tolist() == [1] * 8  # what was given stays readable
    abandoned = Collected(0, tmp_path)
    abandoned.add(torch.ones(4))
    abandoned.add(torch.ones(4))
    with_it = psutil.Process().num_fds()
    del abandoned
    gc.collect()
    assert psutil.Process().num_fds() < with_it


def test_a_result_is_final() -> None:
    rows = Collected()
    rows.add(torch.ones(1))
    assert rows.result() is rows.result()
    with pytest.raises(WrongOrder, match="result was taken"):
        rows.add(torch.ones(1))


def test_batches_that_are_built_differently_are_refused(collected) -> None:
    for first, second in [
        (torch.ones(1), (torch.ones(1),)),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ((torch.ones(1), None), (torch.ones(1), torch.ones(1))),
        (torch.ones(1, 2), torch.ones(1)),
    ]:
        with pytest.raises(BadInput, match="built differently"):
            filled(collected(), first, second)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(BadType, match="Cannot collect a str"):
        Collected().add({"logits": torch.ones(1), "note": "hello"})


def test_a_full_disk_is_told_with_the_folder_and_the_bytes(tmp_path) -> None:
    rows = Collected(1000, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DiskFull) as caught:
            for _ in range(100):
                rows.add(torch.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = str(caught.value)
    assert str(tmp_path) in told and os.strerror(errno.EFBIG) in told
    assert "1,040,000 bytes" in told and "preprocess_logits_for_metrics" in told


_BIG = """
import resource, sys
import numpy as np, torch
from anytrain.engine.metrics import Collected

gigabytes, folder = float(sys.argv[1]), sys.argv[2]
batch, width = 64, 2**16  # 16 MiB
num = int(gigabytes * 2**30 / (batch * width * 4))
rows = Collected(2**26, folder)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
def anonymous():
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10
rows.add(torch.zeros(batch, width - 7))  # all others are longer: the file is laid out anew
before = peak()
for index in range(num):
    rows.add(torch.full((batch, width), float(index)))
result = rows.result()
assert result.shape == (batch * (num + 1), width), result.shape
print("MiB while collecting", peak() - before)
assert peak() - before < 300, peak() - before
assert result[0, -1] == -100 and result[0, 0] == 0
held = anonymous()
right = sum(
    int((result[start : start + batch].argmax(-1) == 0).sum())
    for start in range(0, len(result), batch)
)
assert right == len(result)
assert all(result[batch * (index + 1), -1] == index for index in range(num))
print("MiB of its own while reading", anonymous() - held)
assert anonymous() - held < 100
"""


def test_more_than_memory_should_hold_is_collected_in_bounded_memory(tmp_path) -> None:
    run_script(_BIG, 1.1, tmp_path)


@pytest.mark.full
def test_ten_gigabytes_are_collected_in_bounded_memory(tmp_path) -> None:
    if shutil.disk_usage(tmp_path).free < 15 * 2**30:
        pytest.skip(f"less than 15 GiB are free in {tmp_path}")
    run_script(_BIG, 10, tmp_path, timeout=280)
