"""Single runs boiled down: ratios, and who learnt something else."""

from __future__ import annotations

import math

import pytest

from anytrain.recipes.bench import report
from anytrain.recipes.bench.comparison import Comparison, summarise


def ran(name: str, seconds: float, precision: str = "bf16", **more: object) -> dict[str, object]:
    usual = {
        "train_loss": 0.5,
        "eval_loss": 0.4,
        "accuracy": 0.8,
        "f1": 0.85,
        "samples_per_second": 100 / seconds,
        "peak_bytes": 2**30,
    }
    told = {"name": name, "seed": 1, "seconds": seconds, "precision": precision}
    return {**told, **usual, **more}


RUNS = [
    ran("anytrain", 2.0),
    ran("anytrain-fp32-padded", 8.0, "fp32"),
    ran("hf", 20.0, "fp32"),
    ran("hf-bf16", 12.0),
    ran("raw-bf16", 6.0),
]


def test_each_of_ours_is_held_to_the_fastest_peer_of_its_precision() -> None:
    rows = {row.contender.name: row for row in summarise(RUNS)}
    assert rows["anytrain"].like == ("raw-bf16", 3.0)
    assert rows["anytrain-fp32-padded"].like == ("hf", 2.5)
    assert rows["hf-bf16"].like is None
    assert rows["anytrain"].base_ratio == 10.0


def test_without_hf_as_it_comes_there_is_no_ratio_to_it() -> None:
    assert all(row.base_ratio is None for row in summarise(RUNS[:2]))


def test_several_seeds_give_the_median_and_a_deviation() -> None:
    (row,) = summarise([ran("hf", s, "fp32") for s in (10.0, 30.0, 20.0)])
    assert row.seconds == 20.0
    assert row.spread("seconds") == 10.0
    assert row.middle("accuracy") == 0.8
    assert row.spread("accuracy") == 0.0


@pytest.mark.parametrize("odd", [{"train_loss": 0.7}, {"accuracy": 0.5}, {"train_loss": math.nan}])
def test_who_learnt_something_else_is_marked(odd: dict[str, float]) -> None:
    runs = [*RUNS[:-1], ran("raw-bf16", 1.0, **odd)]
    unlike = [row.contender.name for row in summarise(runs) if row.unlike]
    assert unlike == ["raw-bf16"]
    told = report.markdown(Comparison(SETTINGS, MACHINE, "2026-01-01", runs))
    assert "| raw-bf16 (!) |" in told
    assert f"(!) raw-bf16 learnt something else: {next(iter(odd))}" in told
    assert "All learnt the same" not in told


def test_a_language_model_is_judged_by_its_loss_on_texts_held_out() -> None:
    losses = {"hf-bf16": 3.0, "raw-bf16": 3.1, "anytrain": 4.0}
    runs = [ran(name, 1.0, eval_loss=loss, accuracy=None) for name, loss in losses.items()]
    assert [row.contender.name for row in summarise(runs) if row.unlike] == ["anytrain"]


SETTINGS = {
    "size": "tiny",
    "model": None,
    "data": None,
    "batch_size": 16,
    "length": 128,
    "epochs": 2,
    "max_steps": 0,
    "learning_rate": 5e-3,
    "warm_up_steps": 1,
}
MACHINE = {
    "device": "a processor",
    "threads": 1,
    "parameters": 41122,
    "rows": 192,
    **dict.fromkeys(
        ("python", "torch", "anytrain", "transformers", "accelerate", "lightning"), "1.0"
    ),
}


def test_the_report_names_precisions_ratios_the_missing_and_every_run() -> None:
    found = Comparison(SETTINGS, MACHINE, "2026-01-01", RUNS, {"fabric-bf16": "it is not there"})
    told = report.markdown(found)
    assert "| anytrain | anytrain Trainer, as `anytrain glue` | bf16 | buckets | 2.00 |" in told
    assert "10.00x | 3.00x raw-bf16 |" in told
    assert "- fabric-bf16: left out, it is not there." in told
    assert "All learnt the same" in told
    assert told.count('"seed": 1') == len(RUNS)


def test_steps_of_a_shape_are_shown_with_what_was_measured() -> None:
    shape = {"shape": "32x128", "step_s": 0.01, "cpu_s": 0.002, "samples_per_second": 3200.0,
             "matmul_share": 0.4, "busy_s": 0.0099, "idle": 0.01, "profiled_idle": 0.02,
             "host_waits": 0.0, "profiled_steps": 30.0}  # fmt: skip
    slower = {**shape, "step_s": 0.02}
    runs = [ran("anytrain", 2.0, shapes=[slower]), ran("anytrain", 2.0, shapes=[shape])]
    _, (head, lines) = report.grids(summarise(runs))
    (line,) = lines
    shown = dict(zip(head, line, strict=True))
    assert shown["ms"] == "10.00"
    assert shown["of the matmul rate"] == "40.0 %"
    assert shown["idle"] == "1.0 %"
    assert shown["host waits"] == "0 in 30 steps"
