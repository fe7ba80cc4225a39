"""What a preflight tells: verdicts, values, text and a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from anytrain.insight.preflight import memory
from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.report import FILE, Outlook, Report, foretold, keep
from anytrain.insight.preflight.run import Start, preflight_of
from anytrain.insight.preflight.targets import Target, parse_target
from anytrain.insight.preflight.trace import Setting, SourcePlace, Trace
from made_traces import CUDA, LINE, MPS, op, trace


def report(traced: Trace, *targets: Target, quick: bool = True) -> Report:
    def tracing(target: Target, setting: Setting | None) -> Trace:
        return traced

    return preflight_of(tracing, targets, ("train.py", "--lr", "1"), quick=quick)


EVIL = SourcePlace("<b>m</b>", "train.py", 3, "f", "x = '<script>alert(1)</script>'")


def test_a_verdict_says_if_it_runs_and_if_it_fits() -> None:
    (good,) = report(trace(op()), MPS).outlooks
    assert (good.verdict, good.runs, good.has_room) == ("runs, fits", True, True)
    (bad,) = report(trace(op("linalg_eigh", dtype="float64")), MPS).outlooks
    assert bad.verdict == "fails, fits"
    (open_,) = report(trace(op()), parse_target("mps:m2")).outlooks
    assert open_.verdict == "runs, memory not judged"


def test_a_run_that_does_not_fit_is_an_error() -> None:
    found = report(trace(op()), parse_target("cuda:1MB"))
    (outlook,) = found.outlooks
    assert outlook.has_room is False
    assert outlook.verdict == "fails, does not fit"
    assert [each.kind for each in outlook.findings if each.severity == "error"] == ["memory"]
    assert found.fails_on("error")


def test_a_trace_that_failed_is_an_error_at_its_line() -> None:
    failed = trace(failure="ValueError: no\nwith more", failure_place=LINE)
    (outlook,) = report(failed, CUDA).outlooks
    (found,) = outlook.findings
    assert (found.kind, found.what, found.place) == ("trace", "The run fails: ValueError: no", LINE)
    assert outlook.memory is None


def test_what_is_grave_enough_fails() -> None:
    warned = report(trace(op("item", host_read="item")), CUDA)
    assert warned.fails_on("warning")
    assert not warned.fails_on("error")
    assert not report(trace(op()), CUDA).fails_on("warning")


def test_a_kind_of_device_is_traced_once() -> None:
    calls = []

    def tracing(target: Target, setting: Setting | None) -> Trace:
        calls.append(target.kind)
        return trace(op())

    preflight_of(tracing, [MPS, parse_target("mps:32GB"), CUDA], quick=True)
    assert calls == ["mps", "cuda"]


def test_json_holds_everything() -> None:
    made = report(trace(op("item", host_read="item"), lengths=(3, 4)), CUDA, MPS)
    told = json.loads(made.as_json())
    assert told["command"] == ["train.py", "--lr", "1"]
    first = told["targets"][0]
    assert first["verdict"] == "runs, fits"
    assert first["findings"][0]["place"]["line"] == 12
    assert first["memory"]["peak_bytes"] > 0
    assert first["timeline"][0]["total_bytes"] == 2**20
    assert first["time"]["assumption"].startswith("An estimate")
    assert "lengths" not in first["job"]


def test_the_text_names_line_reason_and_way_out() -> None:
    text = str(report(trace(op("item", host_read="item", calls=3)), CUDA))
    assert "cuda:24GB: runs, fits" in text
    assert "at train.py:12 in encoder.layer.0" in text
    assert "if loss.item() > 0:" in text
    assert "3 times a step" in text
    assert "fix: " in text
    assert "An estimate" in text
    assert "of 24.00 GiB" in text


def test_a_batch_that_takes_all_of_the_data_says_so() -> None:
    def tracing(target: Target, setting: Setting | None) -> Trace:
        size = 8 if setting is None else setting.batch_size
        made = trace(op(), batch_size=size, num_samples=40, length=59)
        return memory.replace(made, held=memory.replace(made.held, peak_bytes=size * 2**20))

    text = str(preflight_of(tracing, [parse_target("mps:16GB")]))
    assert "40 (all of the data)" in text
    assert "a batch of 8 as long as the longest sample (59)" in " ".join(text.split())
    started = preflight_of(tracing, [parse_target("mps:16GB")], start=Start(2))
    assert "20 (all of the data)" in str(started)
    assert "2 processes cannot train together on mps" in str(started)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_escapes_everything() -> None:
    finding = Finding("kernels", "error", "<i>no</i>", "a & b", '"quoted"', EVIL)
    made = report(trace(op()), MPS)
    made = Report(("<x>",), (Outlook(MPS, made.outlooks[0].job, (finding,)), *made.outlooks))
    html = made.as_html()
    page = _Page()
    page.feed(html)
    assert not page.open
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "&lt;script&gt;alert(1)" in html
    assert "svg" in page.tags
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_the_page_shows_the_lines_around_a_finding(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("".join(f"line_{n} = {n}\n" for n in range(1, 11)))
    read = op("item", host_read="item", place=SourcePlace("", str(script), 5, "f", "line_5 = 5"))
    html = report(trace(read), CUDA).as_html()
    assert '<span class="here">    5  line_5 = 5</span>' in html
    assert "line_2 = 2" in html
    assert "line_8 = 8" in html
    assert "line_9 = 9" not in html


def test_a_notebook_shows_the_page_apart() -> None:
    shown = report(trace(op()), CUDA)._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<script" not in shown


def test_a_forecast_is_kept_beside_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = report(trace(op(), output_dir=str(folder)), CUDA, MPS)
    assert keep(made) == [folder / FILE]
    told = foretold(folder, "cuda")
    assert told is not None
    assert told["target"] == "cuda:24GB"
    assert told["needed_bytes"] > 0
    assert foretold(folder, "tpu") is None
    (folder / FILE).write_text("torn{")
    assert foretold(folder, "cuda") is None
    assert foretold(None, "cuda") is None


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_largest_batch_is_looked_for_in_each_setting(precision: str) -> None:
    seen: list[Setting] = []

    def tracing(target: Target, setting: Setting | None) -> Trace:
        size = 8 if setting is None else setting.batch_size
        if setting is not None:
            seen.append(setting)
        checkpointed = ("block",) if setting is not None and setting.is_checkpointed else ()
        made = trace(op(), batch_size=size, precision=precision, checkpointed_modules=checkpointed)
        peak = size * 2**27
        held = memory.replace(made.held, peak_bytes=peak, by_owner={"activations": peak})
        return memory.replace(made, held=held)

    said: list[str] = []
    (outlook,) = preflight_of(tracing, [parse_target("mps:16GB")], say=said.append).outlooks
    assert [fit.setting.precision for fit in outlook.fits] == [precision]
    assert Setting(8, precision) not in seen  # the run itself has shown it
    word = "float32" if precision == "no" else precision
    assert said[:2] == [
        "mps:16GB: tracing the run",
        f"mps:16GB: tracing a batch of 16 in {word}",
    ]
    (outlook,) = preflight_of(tracing, [parse_target("mps:16GB")], thorough=True).outlooks
    words = [(f.setting.precision, f.setting.is_checkpointed) for f in outlook.fits]
    assert words == [("no", False), ("bf16", False), ("bf16", True)][precision == "bf16" :]
    assert all(8 < fit.largest < 128 for fit in outlook.fits)
    assert "largest batch" in str(Report((), (outlook,)))
