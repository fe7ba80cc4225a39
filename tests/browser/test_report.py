"""The report of a run in a real browser."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from browsing import SCREENSHOTS, screenshot, scrolls_sideways, until, visit
from written_runs import write_run

EVIL = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>\u2028'\"&lt;{{7*7}}"
LOSS = "anytrain.plots['figure loss']"


def report(run: Path, made: Path) -> Path:
    done = CliRunner().invoke(app, ["report", str(run), "-o", str(made)])
    assert done.exit_code == 0, done.output
    return made


def demo(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "anytrain", "demo", "--output", str(folder), *options]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def logged(run: Path, name: str) -> list[tuple[float, float]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["step"], e[name]) for e in entries if name in e and "train_runtime" not in e]


def drawn(page: Any, chart: str, line: str) -> list[tuple[float, float]]:
    plot = f"anytrain.plots[{chart!r}]"
    xs, ys = page.evaluate(
        f"[{plot}.data[0], {plot}.data[{plot}.series.findIndex(s => s.label === {line!r})]]"
    )
    pairs = zip(xs, ys, strict=True)
    return [(x, y) for x, y in pairs if y is not None]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    assert demo(folder, "--epochs", "1", "--pairs", "2000").wait(240) == 0
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run that has everything."""
    folder = tmp_path_factory.mktemp("written")
    return report(write_run(folder / "run"), folder / "report.html")


def test_the_demos_report_shows_what_the_demo_logged(browser, demo_run: Path, tmp_path) -> None:
    with visit(browser, report(demo_run, tmp_path / "report.html")) as seen:
        page = seen.page
        assert len(logged(demo_run, "eval_loss")) == 2
        assert drawn(page, "figure loss", "eval") == logged(demo_run, "eval_loss")
        if losses := logged(demo_run, "loss"):
            assert drawn(page, "figure loss", "train") == losses
        assert drawn(page, "figure accuracy", "eval") == logged(demo_run, "eval_accuracy")
        assert page.get_by_text("The run finished at step 32").is_visible()
        for canvas in page.locator("canvas").all():
            assert canvas.bounding_box()["height"] > 100
        screenshot(page, "report-demo")
        seen.assert_quiet()


def test_lines_of_training_and_evaluation_are_the_logs(browser, made: Path) -> None:
    run = made.parent / "run"
    with visit(browser, made) as seen:
        # The first life wrote 20 steps that the second one did again: each step counts once.
        assert drawn(seen.page, "figure loss", "train") == sorted(dict(logged(run, "loss")).items())
        assert drawn(seen.page, "figure loss", "eval") == sorted(
            dict(logged(run, "eval_loss")).items()
        )
        assert seen.page.evaluate("Object.keys(anytrain.plots).length") == 9
        screenshot(seen.page, "report-light")
        seen.assert_quiet()


def test_dragging_zooms_and_a_double_click_or_the_button_shows_all(browser, made: Path) -> None:
    with visit(browser, made) as seen:
        page = seen.page
        over = page.locator("[data-chart='figure loss'] .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        scale = f"[{LOSS}.scales.x.min, {LOSS}.scales.x.max]"
        whole = page.evaluate(scale)

        def drag() -> None:
            page.mouse.move(box["x"] + 100, box["y"] + 80)
            page.mouse.down()
            page.mouse.move(box["x"] + 300, box["y"] + 90, steps=5)
            page.mouse.up()

        drag()
        low, high = page.evaluate(scale)
        assert whole[0] < low < high < whole[1]
        page.mouse.dblclick(box["x"] + 150, box["y"] + 80)
        assert page.evaluate(scale) == whole
        drag()
        assert page.evaluate(scale) != whole
        page.get_by_role("button", name="Show all: Loss").click()
        assert page.evaluate(scale) == whole
        page.mouse.move(box["x"] + 200, box["y"] + 80)
        assert "0." in page.locator("[data-chart='figure loss'] .u-legend").inner_text()
        seen.assert_quiet()


def test_everything_can_be_done_with_the_keyboard(browser, made: Path) -> None:
    with visit(browser, made) as seen:
        page = seen.page
        page.keyboard.press("Tab")
        skip = page.locator(":focus")
        assert skip.inner_text() == "Skip to the report"
        assert skip.bounding_box()["x"] >= 0
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.classList.contains('plot')"):
                break
        focus = "getComputedStyle(document.activeElement)"
        assert page.evaluate(f"{focus}.outlineStyle") == "solid"
        said = page.locator("[data-chart='figure loss'] [aria-live]")
        page.keyboard.press("ArrowRight")
        assert said.inner_text().startswith("step 1: train 0.8")
        page.keyboard.press("ArrowRight")
        assert said.inner_text().startswith("step 2: train 0.8")
        page.keyboard.press("End")
        assert said.inner_text().startswith("step 400:")
        whole = page.evaluate(f"{LOSS}.scales.x.max - {LOSS}.scales.x.min")
        page.keyboard.press("+")
        assert page.evaluate(f"{LOSS}.scales.x.max - {LOSS}.scales.x.min") == whole / 2
        page.keyboard.press("-")
        page.keyboard.press("+")
        page.keyboard.press("0")
        assert page.evaluate(f"{LOSS}.scales.x.max - {LOSS}.scales.x.min") == whole
        seen.assert_quiet()


def test_arrow_keys_pass_points_that_have_one_x(browser, tmp_path: Path) -> None:
    points = [[0, 1], [0, 2], [0, 3], [1, 1], [1, 1], [1, 2]]
    values = {"format": 1, "step": 1, "kind": "regression", "num_samples": 6, "points": points}
    run = write_run(tmp_path / "run", evaluation_json=json.dumps(values))
    with visit(browser, report(run, tmp_path / "report.html")) as seen:
        page = seen.page
        figure = page.locator("[data-chart='points eval']")
        said = figure.locator("[aria-live]")
        legend = figure.locator(".u-legend tr").nth(1).locator("td")
        figure.locator(".plot").focus()

        def walk() -> list[str]:
            heard = []
            for _ in points:
                page.keyboard.press("ArrowRight")
                heard.append(said.inner_text())
                assert legend.inner_text() == heard[-1].split()[-1]
            return heard

        expected = [f"true {x}: predicted {y}" for x, y in points]
        assert walk() == expected
        page.keyboard.press("ArrowRight")
        assert said.inner_text() == expected[-1]
        page.keyboard.press("Home")
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        assert said.inner_text() == expected[-2]
        over = figure.locator(".u-over").bounding_box()
        page.mouse.move(over["x"] + 12, over["y"] + 40)  # from here on, the mouse says where
        page.keyboard.press("ArrowRight")
        assert said.inner_text().startswith("true 0:")
        seen.assert_quiet()


def test_a_figure_may_have_the_name_of_anything(browser, tmp_path: Path) -> None:
    names = ("constructor", "toString", "__proto__", "hasOwnProperty")
    for n, run in enumerate(("one", "two")):
        lines = [{"step": step, **dict.fromkeys(names, step + n)} for step in range(5)]
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    page = tmp_path / "diff.html"
    runs = [str(tmp_path / run) for run in ("one", "two")]
    assert CliRunner().invoke(app, ["diff", *runs, "-o", str(page)]).exit_code == 0
    for made in (page, report(tmp_path / "one", tmp_path / "report.html")):
        with visit(browser, made) as seen:
            assert seen.page.locator("figure canvas").count() == len(names)
            assert seen.page.evaluate("Object.keys(anytrain.plots).length") == len(names)
            seen.assert_quiet()


def test_what_scrolls_and_takes_the_focus_has_a_role_and_a_name(browser, tmp_path: Path) -> None:
    made = report(write_run(tmp_path / "run"), tmp_path / "report.html")
    with visit(browser, made, width=360, height=740) as seen:
        seen.page.locator("[data-chart='figure loss'] summary").click()
        reached = seen.page.locator("main :is(div, pre)[tabindex='0']").evaluate_all(
            "all => all.map((each) => [each.role, each.ariaLabel])"
        )
        assert ["region", "Each class"] in reached
        assert ["region", "How to reproduce"] in reached
        assert ["region", "Data as a table: Loss"] in reached
        assert all(role in ("region", "application") and name for role, name in reached)
        seen.assert_quiet()


def test_a_chart_has_a_name_words_and_a_table(browser, made: Path) -> None:
    with visit(browser, made) as seen:
        page = seen.page
        chart = page.get_by_role("application", name="Loss.")
        words = chart.evaluate(
            "e => document.getElementById(e.getAttribute('aria-describedby')).textContent"
        )
        assert words.startswith("train: from 0.8722 to 0.2488; lowest")
        figure = page.locator("[data-chart='figure loss']")
        figure.locator("summary").click()
        rows = figure.locator("tbody tr")
        rows.first.wait_for()  # the page hears of an opened table a moment later
        assert rows.count() == 400
        assert figure.locator("caption").inner_text() == "Loss"
        assert page.locator("main").count() == page.locator("header").count() == 1
        assert page.get_by_role("navigation", name="Contents").count() == 1
        unnamed = "[...document.querySelectorAll('th:not([scope])')].length"
        assert page.evaluate(unnamed) == 0
        seen.assert_quiet()


def test_texts_and_charts_can_be_read_in_light_and_dark(browser, made: Path) -> None:
    for dark in (False, True):
        with visit(browser, made, dark=dark) as seen:
            weak = seen.page.evaluate(WEAK_TEXTS)
            assert weak == []
            if dark:
                screenshot(seen.page, "report-dark")
            back = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (back == "rgb(255, 255, 255)") is not dark
            # The line itself, from the middle of the canvas's pixels.
            light = seen.page.evaluate(LIGHTNESS)
            assert light > 0.4 if dark else light < 0.6
            seen.assert_quiet()


def test_charts_follow_a_change_of_scheme(browser, made: Path) -> None:
    with visit(browser, made) as seen:
        before = seen.page.evaluate(LIGHTNESS)
        seen.page.emulate_media(color_scheme="dark")
        until(seen.page, f"({LIGHTNESS}) > {before}")
        seen.assert_quiet()


@pytest.mark.parametrize("word", ["news", EVIL])
def test_on_a_phone_nothing_scrolls_sideways_but_wide_tables(browser, tmp_path, word) -> None:
    made = report(write_run(tmp_path / "run", word), tmp_path / "report.html")
    with visit(browser, made, width=360, height=740, has_touch=True) as seen:
        assert not scrolls_sideways(seen.page)
        assert seen.page.evaluate(f"{LOSS}.width") < 340
        reach = "document.querySelectorAll('.wide[tabindex]').length"
        assert seen.page.evaluate(reach) > 0, "a keyboard reaches a table that scrolls"
        if word == "news":
            screenshot(seen.page, "report-phone")
        seen.assert_quiet()


def test_html_in_a_run_is_shown_as_text(browser, tmp_path) -> None:
    made = report(write_run(tmp_path / "run", EVIL), tmp_path / "report.html")
    with visit(browser, made) as seen:
        page = seen.page
        page.locator("[data-chart='figure loss'] summary").click()
        page.wait_for_timeout(200)
        assert page.locator("img").count() == 0
        assert EVIL[:40] in page.locator("h1").inner_text()
        assert page.title() == f"{EVIL}: report"
        screenshot(page, "report-escaped")
        seen.assert_quiet()


def test_it_prints_on_white_paper_with_charts_that_fit(browser, made: Path) -> None:
    with visit(browser, made, dark=True) as seen:
        page = seen.page
        path = SCREENSHOTS / "report.pdf"
        path.parent.mkdir(parents=True, exist_ok=True)
        page.pdf(path=path, format="A4")
        assert path.read_bytes().startswith(b"%PDF")
        assert page.evaluate(f"{LOSS}.width") > 900, "after it, the screen is as it was"
        page.set_viewport_size({"width": 718, "height": 1000})
        page.emulate_media(media="print", color_scheme="dark")
        until(page, f"{LOSS}.width === 860")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert page.evaluate(LIGHTNESS) < 0.6
        for canvas in page.locator("canvas").all():
            assert canvas.bounding_box()["width"] <= 718
        assert not scrolls_sideways(page)
        assert page.locator("nav").is_hidden()
        screenshot(page, "report-print")
        seen.assert_quiet()


def test_a_chart_is_updated_in_place_and_keeps_its_zoom(browser, made: Path) -> None:
    with visit(browser, made) as seen:
        page = seen.page
        page.evaluate(f"{LOSS}.setScale('x', {{min: 100, max: 150}})")
        page.evaluate(
            """() => {
                const known = JSON.parse(document.getElementById("anytrain-charts").textContent);
                const loss = known.charts[0];
                loss.series[0].x.push(401); loss.series[0].y.push(0.1); loss.summary = "new words";
                const made = {...known.charts[1], name: "fresh", title: "Fresh"};
                anytrain.update({charts: [loss, made]});
            }"""
        )
        assert drawn(page, "figure loss", "train")[-1] == (401, 0.1)
        scale = page.evaluate(f"[{LOSS}.scales.x.min, {LOSS}.scales.x.max]")
        assert scale == [100, 150]
        figures = page.locator("figure")
        assert figures.nth(0).locator("p").inner_text() == "new words"
        assert figures.nth(1).locator("figcaption").inner_text() == "Fresh"
        seen.assert_quiet()


def test_sizes_that_differ_little_have_marks_that_differ(browser, made: Path) -> None:
    memory = "anytrain.plots['machine memory']"
    sizes = "[334.28 * 2 ** 20, 334.28 * 2 ** 20, 334.56 * 2 ** 20]"
    with visit(browser, made) as seen:
        series = seen.page.evaluate(f"{memory}.series.length - 1")
        told = f"[[1, 30, 60], {', '.join([sizes] * series)}]"
        seen.page.evaluate(f"{memory}.setData({told})")
        until(seen.page, f"{memory}.axes[1]._values[0].startsWith('334')")
        marks = seen.page.evaluate(f"{memory}.axes[1]._values")
        assert len(marks) > 1
        assert len(set(marks)) == len(marks), marks
        seen.assert_quiet()


def test_a_killed_run_has_a_report_up_to_its_last_line(browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = demo(run, "--epochs", "200", "--pairs", "2000")
    log = run / "metrics.jsonl"
    try:
        until = time.monotonic() + 240
        while not (log.is_file() and log.read_text().count("\n") >= 4):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with log.open("a") as file:
        file.write('{"step": 99999, "eval_lo')  # what a kill leaves of a line
    with visit(browser, report(run, tmp_path / "report.html")) as seen:
        whole = [line for line in log.read_text().splitlines() if line.endswith("}")]
        evaluated = [entry for line in whole if "eval_accuracy" in (entry := json.loads(line))]
        last = (evaluated[-1]["step"], evaluated[-1]["eval_accuracy"])
        assert drawn(seen.page, "figure accuracy", "eval")[-1] == last
        told = seen.page.locator("#summary p").first.inner_text()
        assert told.startswith("The run was killed")
        assert "99,999" not in told
        screenshot(seen.page, "report-killed")
        seen.assert_quiet()


# How light what is drawn in the loss's chart is, weighed by how far it is from the page's back.
LIGHTNESS = """(() => {
    const canvas = document.querySelector("[data-chart='figure loss'] canvas");
    // From a copy: a browser complains of a canvas that is read again and again.
    const {width, height} = canvas;
    const copy = Object.assign(document.createElement("canvas"), {width, height});
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(canvas, 0, 0);
    const {data} = context.getImageData(0, 0, width, height);
    let sum = 0, count = 0;
    for (let n = 0; n < data.length; n += 4) {
        const [r, g, b, a] = data.slice(n, n + 4);
        if (a < 200 || Math.max(r, g, b) - Math.min(r, g, b) < 60) continue;
        sum += (r + g + b) / 765; count++;
    }
    return sum / count;
})()"""

# Texts whose contrast with what is behind them is less than 4.5 to 1.
WEAK_TEXTS = """(() => {
    const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, under) => {
        const share = top[3] / 255;
        return [0, 1, 2].map((n) => top[n] * share + under[n] * (1 - share));
    };
    const behind = (element) => {
        const found = [];
        for (let each = element; each; each = each.parentElement)
            found.unshift(rgba(getComputedStyle(each).backgroundColor));
        return found.reduce((under, top) => over(top, under), [255, 255, 255]);
    };
    const light = (colour) => {
        const [r, g, b] = colour.map((value) => {
            const part = value / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const weak = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
        const under = behind(element);
        const text = over(rgba(getComputedStyle(element).color), under);
        const [high, low] = [light(text), light(under)].sort((a, b) => b - a);
        const contrast = (high + 0.05) / (low + 0.05);
        if (contrast < 4.5) weak.push(`${element.tagName} ${element.textContent} ${contrast}`);
    }
    return weak;
})()"""
