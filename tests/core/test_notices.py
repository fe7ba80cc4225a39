"""What a notice looks like, and that it is a warning like any other."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import pytest

from anytrain.core.errors import Notice
from anytrain.core.notices import as_a_line, give_notice
from launching import run_script

# pytest keeps warnings for its summary: what a program shows is seen in a program.
PROGRAM = """
    import sys, threading, warnings
    from anytrain import TrainingArguments
    from anytrain.core.notices import give_notice

    before = warnings.showwarning, warnings.formatwarning, list(warnings.filters)

    def part(name):
        now = warnings.showwarning, warnings.formatwarning, list(warnings.filters)
        assert now == before, name
        print(f"# {name}", file=sys.stderr)

    part("argument")
    TrainingArguments("out", use_mps_device=True)
    part("lines")
    give_notice("Passed over step-3.\\n  why: it is cut.")
    part("other")
    warnings.warn("somebody else's", UserWarning)
    part("threads")
    def speak(who):
        for n in range(50):
            give_notice(f"{who} {n}")
    threads = [threading.Thread(target=speak, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    part("own")
    warnings.formatwarning = lambda message, *more: f"<{message}>\\n"
    give_notice("slow disk")
    warnings.formatwarning = before[1]
    part("filtered")
    warnings.filterwarnings("ignore", message="slow", category=UserWarning)
    give_notice("slow disk again")
"""


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    parts = run_script(PROGRAM).stderr.split("# ")[1:]
    return {name: said for name, _, said in (part.partition("\n") for part in parts)}


def test_a_notice_is_one_line_without_a_file_or_a_line_of_source(shown: dict[str, str]) -> None:
    said = shown["argument"]
    assert said.startswith("anytrain: use_mps_device=True changes nothing: ")
    assert said.count("\n") == 1
    assert "warn" not in said.lower() and ".py" not in said
    assert shown["lines"] == "anytrain: Passed over step-3. why: it is cut.\n"


def test_other_warnings_and_a_program_s_own_way_are_as_before(shown: dict[str, str]) -> None:
    assert "UserWarning: somebody else's" in shown["other"]
    assert shown["own"] == "<slow disk>\n"
    assert shown["filtered"] == ""


def test_threads_may_speak_at_once(shown: dict[str, str]) -> None:
    said = [line for line in shown["threads"].splitlines() if line.startswith("anytrain: ")]
    assert len(said) > 100


def test_filters_and_tests_treat_it_as_a_warning() -> None:
    with pytest.warns(UserWarning, match="slow") as told:
        give_notice("slow disk", stacklevel=1)
    assert (told[0].filename, told[0].category) == (__file__, Notice)
    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        with pytest.raises(Notice, match="slow"):
            give_notice("quick and slow")
    assert warnings.formatwarning is before


def test_a_log_of_warnings_has_the_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("warnings")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(pythons := importlib.util.module_from_spec(spec))
    # Lightning, which a test before this one may have loaded, has put in one of its own.
    monkeypatch.setattr(warnings, "formatwarning", pythons.formatwarning)
    logging.captureWarnings(True)
    try:
        give_notice("slow disk")
    finally:
        logging.captureWarnings(False)
    assert caplog.messages == [f"{as_a_line('slow disk')}\n"]
