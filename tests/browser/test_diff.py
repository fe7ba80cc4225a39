"""The page of `anytrain diff`, opened in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import diffed_runs
from anytrain.insight.report import diff_views
from anytrain.insight.report.diff import compare, curves, open_runs
from browsing import screenshot, scrolls_sideways, visit


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three real runs."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        diffed_runs.train(folder / "one"),
        diffed_runs.train(folder / "other", learning_rate=0.05, seed=7),
        diffed_runs.train(folder / "short", num_train_epochs=1, eval_strategy="no"),
    ]


def page_of(place: Path, *folders: Path) -> Path:
    opened = open_runs(folders)
    path = place / "diff.html"
    diff_views.write(path, compare(opened), [curves(run) for run in opened])
    return path


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_two_runs_lie_over_each_other(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    path = page_of(tmp_path, *runs[:2])
    for width, dark in ((1280, False), (1280, True), (360, False)):
        with visit(browser, path, width=width, dark=dark) as seen:
            seen.page.locator(".uplot").first.wait_for()
            drawn = seen.page.evaluate("anytrain.plots['loss'].data.slice(1)")
            assert drawn == [losses(folder) for folder in runs[:2]]
            told = seen.page.locator("section.told").inner_text()
            assert "learning_rate" in told and "0.05" in told and "seed" in told
            assert seen.page.get_by_text("differ from step 1 on").count() >= 2
            assert seen.page.get_by_text("set beforehand: another from step 1 on").count() == 1
            assert not scrolls_sideways(seen.page)
            screenshot(seen.page, f"diff-{width}-{'dark' if dark else 'light'}")
            seen.assert_quiet()


def test_the_table_of_runs_is_sorted_by_mouse_and_keyboard(
    browser: Any, runs: list[Path], tmp_path: Path
) -> None:
    with visit(browser, page_of(tmp_path, *runs)) as seen:
        page = seen.page
        order = "[...document.querySelectorAll('.sortable tbody th')].map(each => each.innerText)"
        assert page.evaluate(order) == ["A one", "B other", "C short"]
        page.get_by_role("button", name="learning_rate", exact=True).click()
        page.get_by_role("button", name="learning_rate", exact=True).click()
        assert page.evaluate(order)[0] == "B other"
        assert page.locator("th[aria-sort=descending]").count() == 1
        page.get_by_role("button", name="step", exact=True).focus()
        page.keyboard.press("Enter")
        assert page.evaluate(order) == ["C short", "B other", "A one"]
        evals = page.get_by_role("button", name="eval_loss, last", exact=True)
        for _ in range(2):  # a run without a value is last, whichever way
            evals.click()
            assert page.evaluate(order)[-1] == "C short"
        screenshot(page, "diff-many")
        seen.assert_quiet()


def test_nothing_of_a_run_can_run_in_the_page(browser: Any, tmp_path: Path) -> None:
    evil = diffed_runs.EVIL
    folders = [
        diffed_runs.written(tmp_path / name, {0: 1.0, 1: "NaN", 2: n}, f"{evil}{name}")
        for n, name in enumerate("abc")
    ]
    for some in (folders[:2], folders):
        with visit(browser, page_of(tmp_path, *some)) as seen:
            seen.page.locator(".uplot").first.wait_for()
            assert seen.page.locator("img").count() == 0
            assert seen.page.get_by_text("onerror=alert(1)").count() > 3
            seen.assert_quiet()
