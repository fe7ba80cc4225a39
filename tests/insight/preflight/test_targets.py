"""Words for machines."""

from __future__ import annotations

import pytest

from anytrain.core.errors import BadInput
from anytrain.insight.preflight.targets import installed_torch, parse_target, parse_targets

GIB = 2**30


@pytest.mark.parametrize(
    ("word", "kind", "gib", "chip"),
    [
        ("mps:16GB", "mps", 16, ""),
        ("mps:m2:16GB", "mps", 16, "m2"),
        ("mps:M3 Max:64gb", "mps", 64, "m3max"),
        ("cuda:24GB", "cuda", 24, ""),
        ("cuda:512MB", "cuda", 0.5, ""),
        ("gpu:24g", "cuda", 24, ""),
        ("cuda:4090", "cuda", 23.5, "rtx4090"),
        ("cuda:h200", "cuda", 139.8, "h200"),
        ("cuda:h200:40GB", "cuda", 40, "h200"),
        ("tpu:v5e", "tpu", 16, "v5e"),
    ],
)
def test_a_word_says_kind_memory_and_chip(word: str, kind: str, gib: float, chip: str) -> None:
    target = parse_target(word)
    assert (target.kind, target.memory_bytes, target.chip) == (kind, int(gib * GIB), chip)
    assert target.name == word
    assert target.torch_version == installed_torch()


def test_a_kind_alone_has_no_known_memory() -> None:
    assert parse_target("cpu").memory_bytes is None
    assert parse_target("mps:m2").memory_bytes is None


def test_a_layout_counts_the_chips() -> None:
    target = parse_target("tpu:v5e:2x4")
    assert (target.num_devices, target.topology) == (8, "2x4")


def test_another_torch_may_run_there() -> None:
    assert parse_target("mps:16GB@2.15").torch_version == "2.15"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("metal", "'metal' is none of cpu, cuda, mps, tpu, xla"),
        ("cuda:banana", "'banana' is neither a size of memory nor a chip; known for cuda are t4"),
        ("cuda:2x2", "neither a size"),
        ("cpu:h200", "cpu has no chips by name"),
        ("mps:16GB@new", "'new' is not a version of torch"),
        ("cuda:0GB", "without memory"),
        ("", "is none of"),
    ],
)
def test_a_word_that_means_nothing_is_refused_with_examples(word: str, why: str) -> None:
    with pytest.raises(BadInput, match=why) as refused:
        parse_target(word)
    assert '"mps:16GB"' in refused.value.fix


def test_the_same_target_counts_once_and_none_means_this_machine() -> None:
    assert len(parse_targets(("cpu", "cpu"))) == 1
    (own,) = parse_targets(())
    assert own.is_local
    assert own.memory_bytes


@pytest.mark.parametrize("version", ["1.2", "2.8", "2.16", "3.0.1"])
def test_a_torch_whose_kernels_nobody_knows_is_refused(version: str) -> None:
    with pytest.raises(BadInput, match="from 2.9 to 2.15"):
        parse_target(f"mps:16GB@{version}")
