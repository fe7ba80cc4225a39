"""The report of a run, made from its record alone."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from anytrain.core.errors import BadInput
from anytrain.core.records import open_run
from anytrain.insight.pages import charts
from anytrain.insight.pages.charts import Chart, Series, chart_data, thin
from anytrain.insight.report.page import page
from anytrain.insight.report.page_curves import charts_of, history
from written_runs import write_run

EVIL = "</script><img src=x onerror=alert(1)>\u2028'\"&lt;"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def by_name(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts}


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    assert found
    charts = json.loads(found[1])["charts"]
    return {chart["name"]: chart for chart in charts}


def test_every_kind_of_record_has_its_section(run_folder: Path) -> None:
    text = page(open_run(run_folder))
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == [
        "summary", "curves", "evaluation", "time", "shapes", "checkpoints", "warnings", "figures",
        "plan", "arguments", "surroundings", "reproduce",
    ]  # fmt: skip
    for words in (
        "The run finished at step 400",
        "It was started twice",
        "waiting for the next batch",
        "news is slow.",
        "at step 200, 4 times",
        "automatic: news",
        "pip install anytrain==0.1.0",
        "python train.py --name news",
        "changes that were not committed",
        "The seed was 7",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("command", "num_processes", "shown"),
    [
        (["python", "-u", "train.py", "--lr", "1"], 2, "launch --num_processes 2 train.py --lr 1"),
        (["python", "-m", "own.train"], 4, "launch --num_processes 4 --module own.train"),
        (["python", "train.py"], 1, "\npython train.py"),
        (["python", "-c", "..."], 2, "\npython -c ..."),
    ],
)
def test_a_launched_run_is_reproduced_with_all_its_processes(
    run_folder: Path, command: list[str], num_processes: int, shown: str
) -> None:
    record = json.loads((run_folder / "run.json").read_text())
    known = {"command": command, "hardware": {"num_processes": num_processes}}
    record["starts"][-1] |= known
    (run_folder / "run.json").write_text(json.dumps(record))
    assert shown in page(open_run(run_folder))


def test_an_evaluation_of_no_known_step_says_so(run_folder: Path) -> None:
    (run_folder / "evaluation.json").write_text('{"step": null, "num_samples": 3}')
    told = "The last evaluation on 3 samples, by a process that had not trained."
    assert told in page(open_run(run_folder))


def test_training_and_evaluation_share_a_chart_with_the_starts_marked(run_folder: Path) -> None:
    run = open_run(run_folder)
    charts = by_name(charts_of(run))
    loss = charts["figure loss"]
    assert [series.name for series in loss.series] == ["train", "eval"]
    assert list(loss.marks) == [(200.0, "start 2")]
    assert loss.series[1].points == history(run, "eval_loss")
    steps = [x for x, _ in loss.series[0].points]
    assert steps == sorted(set(steps)), "what the first life did beyond its kill is told once"
    assert {"figure learning_rate", "figure grad_norm", "figure accuracy"} <= set(charts)
    assert {"machine rate", "machine memory"} <= set(charts)
    assert charts["machine memory"].unit == "bytes"


def lines_of(folder: Path, *names: str) -> dict[str, list[str]]:
    """The charts of a run that logged these figures twice, each with the names of its lines."""
    lines = [{"step": step, **{name: float(n) for n, name in enumerate(names)}} for step in (1, 2)]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    charts = charts_of(open_run(folder))
    return {chart.name: [series.name for series in chart.series] for chart in charts}


def test_no_figure_is_lost_or_named_as_another(tmp_path: Path) -> None:
    assert lines_of(tmp_path / "1", "eval_f1", "eval/f1", "f1") == {
        "figure f1": ["train", "eval_f1", "eval/f1"]
    }
    assert lines_of(tmp_path / "2", "loss", "train_loss", "eval_loss") == {
        "figure loss": ["loss", "train_loss", "eval"]
    }


def test_a_loss_of_its_own_is_no_set_of_samples(tmp_path: Path) -> None:
    figures = ("loss", "eval_loss", "contrastive_loss", "eval_contrastive_loss")
    apart = {"figure loss": ["train", "eval"], "figure contrastive_loss": ["train", "eval"]}
    assert lines_of(tmp_path / "1", *figures) == apart
    timed = ("loss", "eval_loss", "eval_runtime", "eval_aux_loss")
    assert lines_of(tmp_path / "2", *timed) == {
        "figure loss": ["train", "eval"], "figure aux_loss": ["eval"]
    }  # fmt: skip
    sets = ("eval_loss", "eval_runtime", "eval_dev_loss", "eval_dev_runtime")
    assert lines_of(tmp_path / "3", *sets) == {"figure loss": ["eval", "eval_dev"]}


def test_times_that_a_training_notes_have_no_chart_but_a_users_own_have(tmp_path: Path) -> None:
    own = ("tokens_per_second", "kernel_runtime")
    noted = ("eval_runtime", "eval_dev_steps_per_second", "train_samples_per_second", "total_flos")
    assert set(lines_of(tmp_path / "1", *own, *noted)) == {f"figure {name}" for name in own}


def test_a_value_that_is_no_number_is_a_gap_and_is_told(run_folder: Path) -> None:
    norm = by_name(charts_of(open_run(run_folder)))["figure grad_norm"]
    (series,) = chart_data([norm])["charts"][0]["series"]
    assert series["y"][series["x"].index(5)] is None
    assert "Not finite: 1 of 390." in norm.summary


def test_throughput_is_steps_by_the_time_between_lines(run_folder: Path) -> None:
    rate = by_name(charts_of(open_run(run_folder)))["machine rate"]
    # 220 steps of 32 samples in 40 s, then 200.
    assert [y for _, y in rate.series[0].points][:1] == [pytest.approx(176.0)]
    assert [y for _, y in rate.series[0].points][-1:] == [pytest.approx(160.0)]


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    points = [(float(n), float(random.Random(n).random())) for n in range(100_000)]
    points[54_321], points[77_777] = (54_321.0, 9.0), (77_777.0, -9.0)
    kept = thin(points)
    assert len(kept) <= charts.MOST_POINTS
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert kept == sorted(kept)


def test_thinning_keeps_gaps_that_are_all_there_is() -> None:
    kept = thin([(float(n), None if n > 50 else 1.0) for n in range(100)], most=20)
    assert kept[0] == (0.0, 1.0)
    assert kept[-1] == (99.0, None)


def test_only_the_pages_own_scripts_and_styles_may_run(run_folder: Path) -> None:
    text = page(open_run(run_folder))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for kind in ("script", "style"):
        for each in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S):
            digest = base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy[1]
    assert " style=" not in text
    assert not re.findall(r"\son\w+=", re.sub(r"<script>.*?</script>", "", text, flags=re.S))


def test_html_in_any_text_of_a_run_is_text(tmp_path: Path) -> None:
    text = page(open_run(write_run(tmp_path / "run", EVIL)))
    assert "<img" not in text
    assert "\u2028" not in re.findall(r"<script[^>]*>.*?</script>", text, re.S)[0]
    assert embedded(text)[f"figure {EVIL}"]["title"] == EVIL


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    text = page(open_run(tmp_path))
    assert "How the run ended is not known" in text
    assert "No figure has been logged more than once yet." in text


def test_a_killed_run_is_known_up_to_its_last_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    sheet = folder / "timesheet.jsonl"
    lines = sheet.read_text().splitlines()[:-3]
    sheet.write_text("\n".join(lines).replace("host-news", __import__("socket").gethostname()))
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-30])
    text = page(open_run(folder))
    assert "The run was killed" in text
    assert "It is known up to step 400" in text


def test_arguments_that_were_chosen_come_first(run_folder: Path) -> None:
    given = {"learning_rate": 5e-5, "seed": 42, "warmup_ratio": 0.0}
    text = page(open_run(run_folder), given)
    chosen, _, rest = text.partition("1 argument at the default")
    assert "learning_rate" in chosen.partition('id="arguments"')[2]
    assert "<code>3e-05</code>" in chosen
    assert "warmup_ratio" in rest


def test_a_checkpoint_is_kept_best_or_removed_as_the_last_event_says(tmp_path: Path) -> None:
    words = [
        ("checkpoint", "a/checkpoint-1"), ("best", "checkpoint-1"), ("checkpoint", "checkpoint-2"),
        ("best", "checkpoint-2"), ("removed", "checkpoint-1"), ("checkpoint", "checkpoint-3"),
        ("removed", "checkpoint-4"), ("checkpoint", "checkpoint-4"),
    ]  # fmt: skip
    events = "".join(f"{json.dumps({'kind': kind, 'path': path})}\n" for kind, path in words)
    text = page(open_run(write_run(tmp_path / "run", events_jsonl=events)))
    rows = re.findall(r"checkpoint-(\d)</code>.*?<td>(\w+)</td></tr>", text)
    assert rows == [("1", "removed"), ("2", "best"), ("3", "kept"), ("4", "kept")]


def damaged(value: Any, rng: random.Random) -> Any:
    """Return the value with something in it that does not belong there."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], damaged(value[place], rng), *value[place + 1 :]]
    return rng.choice([None, [], {}, "x", -1, 1e308, True, [[1]], {"a": {}}, "NaN", 10**30])


@pytest.mark.parametrize("seed", range(25))
def test_no_damage_to_a_record_stops_its_report(run_folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    for path in sorted(run_folder.glob("*.json*")):
        lines = path.read_text().splitlines()
        for _ in range(3):
            place = rng.randrange(len(lines))
            lines[place] = json.dumps(damaged(copy.deepcopy(json.loads(lines[place])), rng))
        path.write_text("\n".join(lines))
    assert "<h1>" in page(open_run(run_folder))


def test_the_command_writes_one_file_and_loads_no_torch(run_folder: Path) -> None:
    code = (
        "import sys; from anytrain.cli.report import report; from pathlib import Path;"
        f"report(Path({str(run_folder)!r}), None, False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == run_folder / "report.html"
    assert (run_folder / "report.html").stat().st_size < 1_000_000


def test_the_command_writes_where_it_is_told_and_says_why_it_cannot(run_folder: Path) -> None:
    made = run_folder / "elsewhere" / "mine.html"
    assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(made)]).exit_code == 0
    assert made.is_file()
    (run_folder / "taken").mkdir()
    failed = CliRunner().invoke(app, ["report", str(run_folder), "-o", str(run_folder / "taken")])
    assert failed.exit_code == 2
    assert "Cannot write the report" in failed.output
    nothing = CliRunner().invoke(app, ["report", str(run_folder / "taken")])
    assert "no record of a run" in nothing.output


def test_characters_that_no_file_can_hold_are_shown_by_their_numbers(tmp_path: Path) -> None:
    """A folder's name that is no UTF-8, and halves of characters in every file of the record."""
    folder = write_run(tmp_path / os.fsdecode(b"nonutf\xff"), "half \ud800")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "nonutf\\udcff" in text
    assert "half \\ud800 is slow." in text
    assert embedded(text)["figure half \\ud800"]["title"] == "half \\ud800"
    assert 'data-chart="figure half \\ud800"' in text


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_folder / "report.html").write_text("old")
    before = sorted(run_folder.iterdir())

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        failed = CliRunner().invoke(app, ["report", str(run_folder)])
    assert failed.exit_code == 2
    assert "No space left" in failed.output
    assert sorted(run_folder.iterdir()) == before
    assert (run_folder / "report.html").read_text() == "old"


def test_a_link_to_a_report_and_a_device_stay_what_they_are(
    run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    for where in (tmp_path / "link.html", Path("/dev/null")):
        assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(where)]).exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<h1>" in (tmp_path / "real.html").read_text()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "./run.json", "evaluation-new.json", "checkpoint-1/model.safetensors"]
)
def test_the_files_of_a_run_are_not_written_over(run_folder: Path, name: str) -> None:
    (run_folder / "checkpoint-1").mkdir()
    (run_folder / "checkpoint-1" / "model.safetensors").write_bytes(b"weights")
    held = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    failed = CliRunner().invoke(app, ["report", str(run_folder), "-o", str(run_folder / name)])
    assert failed.exit_code == 2
    assert "belongs to the run itself" in failed.output
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == held


def changed_start(folder: Path, **values: Any) -> str:
    """Return the report of a run whose last start says something else."""
    known = json.loads((folder / "run.json").read_text())
    known["starts"][-1].update(values)
    (folder / "run.json").write_text(json.dumps(known))
    return page(open_run(folder))


def test_the_commands_work_in_their_order(run_folder: Path) -> None:
    text = changed_start(run_folder, cwd="/there", versions={"torch": "2.13.0+cpu"})
    commands = re.search(r"<pre>(cd .*?)</pre>", text, re.S)
    assert commands
    assert commands[1].splitlines() == [
        "cd /there",
        "git checkout 0123456789abcdef",
        "pip install torch==2.13.0",
        "python train.py --name news",
    ]
    assert "The build of torch was 2.13.0+cpu." in text


def test_memory_that_is_not_there_is_not_told(run_folder: Path) -> None:
    text = changed_start(run_folder, hardware={"memory_bytes": 2**30, "device_memory_bytes": 0})
    assert "1.00 GiB" in text
    assert "device_memory_bytes" not in text


def test_one_of_anything_is_told_in_the_singular(run_folder: Path) -> None:
    path = run_folder / "timesheet.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {"shapes": ["4x8"], "graphs": 1} if "seconds" in line else {}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = page(open_run(run_folder))
    assert "Batches came in 1 shape: 4x8." in text
    assert "1 graph was compiled." in text


def test_a_start_that_no_curve_can_mark_is_told_in_words(run_folder: Path) -> None:
    assert "started twice; the curves mark where." in page(open_run(run_folder))
    (run_folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({'step': step, 'loss': 1.0})}\n" for step in (300, 400))
    )
    assert "started twice, again after step 200." in page(open_run(run_folder))


def test_a_wrong_token_has_its_column(tmp_path: Path) -> None:
    seen = {"index": 3, "label": "B", "predicted": "A", "confidence": 0.9}
    worst = [
        {**seen, "token": 4, "inputs": {"text": "Ada went to Rome", "token": "Rome"}},
        {**seen, "token": 7},
    ]
    told = {"kind": "classification", "classes": ["A", "B"], "worst": worst}
    text = page(open_run(write_run(tmp_path / "run", evaluation_json=json.dumps(told))))
    assert '<th scope="col">input</th><th scope="col">token</th>' in text
    assert '<td>4: Rome</td><td>B</td><td>A</td><td class="number">90.0%</td>' in text
    assert "<td>7</td>" in text
    assert 'class="dim">token: ' not in text


@pytest.mark.parametrize("moved", [False, True])
def test_checkpoints_are_shown_by_their_place_in_the_run(tmp_path: Path, moved: bool) -> None:
    folder = tmp_path / "run"
    kept = ["/elsewhere/runs/old/checkpoint-1", str(folder / "checkpoint-2"), "/far/checkpoint-3"]
    events = "".join(f"{json.dumps({'kind': 'checkpoint', 'path': path})}\n" for path in kept)
    write_run(folder, events_jsonl=events)
    changes = {"cwd": "/elsewhere", "arguments": {"output_dir": "runs/old"}} if moved else {}
    text = changed_start(folder, **changes)
    shown = re.findall(r"<code>([^<]*checkpoint-\d)</code>", text)
    first = "checkpoint-1" if moved else kept[0]
    assert shown == [first, "checkpoint-2", "/far/checkpoint-3"]


def test_without_the_charts_package_the_error_says_what_to_install(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'anytrain\[report\]'"):
        page(open_run(run_folder))


def test_a_chart_says_in_words_what_it_shows() -> None:
    chart = Chart("a", "A", [Series("one", [(1, 4.0), (2, 1.0), (3, 2.0)])])
    assert chart.summary == "from 4 to 2; lowest 1 at step 2, highest 4 at step 1."
    assert Chart("a", "A", [Series("one", [(7, 4.0)])]).summary == "4 at step 7."
    assert Chart("a", "A", [Series("one", [(7, None)])]).summary == "no finite value."


def test_what_changed_between_the_starts_is_told(run_folder: Path) -> None:
    record = json.loads((run_folder / "run.json").read_text())
    first, second = record["starts"]
    second |= {"arguments": {**second["arguments"], "seed": 8}, "step": 200}
    second["data"] = {"train": {**first["data"]["train"], "num_rows": 9}}
    (run_folder / "run.json").write_text(json.dumps(record))
    text = re.sub("<[^>]+>", " ", page(open_run(run_folder)))
    assert "The starts differ in seed, data.train.num_rows (see Arguments)." in text
    assert "The seed was 7 first, then 8 from step 200 on." in text
    assert re.search(r"data\.train\.num_rows +start 2 +200 +3668 +9", text)


def test_starts_that_are_alike_are_told_without_a_difference(run_folder: Path) -> None:
    assert "differ" not in re.sub("<[^>]+>", " ", page(open_run(run_folder)))


def test_the_last_loss_is_not_called_as_the_mean_of_the_run_is(tmp_path: Path) -> None:
    mean = {"step": 2, "train_runtime": 1.0, "train_loss": 0.75}
    logged = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    for name, lines, tile in (
        ("both", [*logged, mean], "last loss 0.5"),
        ("mean", [mean], "training loss 0.75 mean of the run"),
    ):
        (tmp_path / name).mkdir()
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        shown = re.sub("<[^>]+>", " ", page(open_run(tmp_path / name)))
        assert tile in " ".join(shown.split())
