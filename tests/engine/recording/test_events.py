"""Warnings are events of the run, and are shown as they were before."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.engine.recording.record import Events


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    made = Events(tmp_path / records.EVENTS, step=lambda: 7)
    yield made
    made.rest()


def told(events: Events) -> list[tuple[str, object]]:
    found = records.open_run(events.path.parent).events
    return [(one["text"], one.get("count")) for one in found]


def test_a_warning_is_an_event_and_is_seen_as_before(events: Events) -> None:
    shown = warnings.showwarning
    with pytest.warns(Notice, match="slow disk"):
        events.listen()
        warnings.warn("slow disk", Notice, stacklevel=1)
    (found,) = records.open_run(events.path.parent).events
    assert found.pop("time") > 1e9
    assert found == {"step": 7, "kind": "notice", "text": "slow disk", "category": "Notice"}
    events.rest()
    assert warnings.showwarning is shown


def test_the_same_warning_is_written_once_and_counted(events: Events) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        events.listen()
        for text in ("a", "b", "a", "a"):
            warnings.warn(text, UserWarning, stacklevel=1)
        assert len(events.path.read_text().splitlines()) == 2
        events.rest()
    assert len(seen) == 4
    assert told(events) == [("a", 3), ("b", None)]


def test_what_is_ignored_or_raised_is_no_event(events: Events) -> None:
    events.listen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("nobody hears this", UserWarning, stacklevel=1)
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="raised"):
            warnings.warn("raised", UserWarning, stacklevel=1)
    assert not events.path.exists()


def test_two_runs_hear_the_same_until_each_of_them_rests(tmp_path: Path) -> None:
    shown = warnings.showwarning
    one, other = (Events(tmp_path / n / records.EVENTS, step=lambda: 0) for n in "ab")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        one.listen()
        other.listen()
        warnings.warn("first", UserWarning, stacklevel=1)
        one.rest()
        warnings.warn("second", UserWarning, stacklevel=1)
        other.rest()
    assert warnings.showwarning is shown
    assert [text for text, _ in told(one)] == ["first"]
    assert [text for text, _ in told(other)] == ["first", "second"]


def test_a_library_that_wraps_how_warnings_are_shown_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Events(tmp_path / n / records.EVENTS, step=lambda: 0) for n in "ab")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        one.listen()
        inner = warnings.showwarning
        monkeypatch.setattr(warnings, "showwarning", lambda *given: inner(*given))
        other.listen()
        warnings.warn("once", UserWarning, stacklevel=1)
        other.rest()
        one.rest()
        monkeypatch.undo()
    assert len(seen) == 1
    assert told(one) == told(other) == [("once", None)]


def test_what_a_forked_worker_says_is_its_own(events: Events) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        events.listen()
        child = os.fork()
        if child == 0:
            warnings.warn("from a worker", UserWarning, stacklevel=1)
            os._exit(0)
        os.waitpid(child, 0)
    assert not events.path.exists()


def test_a_notice_holds_no_secret(events: Events) -> None:
    events.hear("Notice", "Cannot read https://h/x?token=abc: try again")
    assert told(events) == [("Cannot read https://h/x?token=*** try again", None)]
