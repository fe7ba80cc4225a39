"""What the first page says of speed was measured, and shows each peer at its best."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "benchmarks" / "results" / "bert-base.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| (.+?) \| (bf16|fp32) \| (.+?) \| ([\d.]+) s \| (?:([\d.]+)x)? ?\|$", re.MULTILINE
)
SHOWN = ROW.findall(README)
PADDING = {"a few lengths": "buckets", "to 128": "max", "dynamic": "dynamic"}


@pytest.mark.parametrize(("who", "precision", "padding", "seconds", "ratio"), SHOWN)
def test_a_figure_of_the_first_table_was_measured(
    who: str, precision: str, padding: str, seconds: str, ratio: str
) -> None:
    assert f"| {who} | {precision} | {PADDING[padding]} | {seconds} |" in MEASURED
    if ratio:
        assert float(ratio) == round(float(seconds) / float(SHOWN[0][3]), 1)


@pytest.mark.parametrize("who", ["HF Trainer", "Accelerate loop", "Lightning Fabric loop"])
def test_a_peer_is_shown_at_its_best(who: str) -> None:
    shown = {(name, precision, padding) for name, precision, padding, *_ in SHOWN}
    assert (who, "bf16", "dynamic") in shown
