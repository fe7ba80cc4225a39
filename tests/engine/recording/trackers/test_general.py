from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput, BadType, Unsupported
from anytrain.engine.recording.trackers.general import GeneralTracker, is_installed, library


class Whole(GeneralTracker):
    name = "whole"
    requires_logging_directory = False
    tracker = None


def test_a_subclass_with_its_three_members_is_accepted() -> None:
    assert Whole().main_process_only


def test_members_may_be_properties_that_work_only_after_start() -> None:
    class Late(GeneralTracker):
        name = "late"

        @property
        def requires_logging_directory(self) -> bool:
            return False

        @property
        def tracker(self) -> object:
            return self.run  # type: ignore[attr-defined]  # set by start()

    assert Late().name == "late"


def test_members_may_be_set_on_the_instance() -> None:
    class Own(GeneralTracker):
        requires_logging_directory = False
        tracker = None

        def __init__(self) -> None:
            self.name = "own"
            super().__init__()

    assert Own().name == "own"


@pytest.mark.parametrize("missing", ["name", "requires_logging_directory", "tracker"])
def test_a_subclass_that_lacks_a_member_is_refused_by_its_name(missing: str) -> None:
    members = {"name": "x", "requires_logging_directory": False, "tracker": None}
    del members[missing]
    kind = type("Partial", (GeneralTracker,), members)
    with pytest.raises(BadType, match=f"Partial lacks '{missing}'"):
        kind()


def test_all_missing_members_are_named_at_once() -> None:
    with pytest.raises(TypeError, match="'name' and 'requires_logging_directory' and 'tracker'"):
        GeneralTracker()


def test_a_subclass_that_lacks_a_member_is_not_implemented_as_hf_says() -> None:
    with pytest.raises(NotImplementedError, match="Empty lacks 'name'") as caught:
        type("Empty", (GeneralTracker,), {})()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.fix) == (type(caught.value), caught.value.fix)


def test_a_blank_tracker_takes_every_call_and_records_nothing() -> None:
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.store_init_configuration({"lr": 1})
    blank.log({"loss": 1.0}, step=1)
    blank.log_images({"seen": []})
    blank.log_table("rows")
    blank.finish()


def test_a_tracker_that_cannot_store_images_or_tables_says_so() -> None:
    with pytest.raises(Unsupported, match="'whole' does not record images"):
        Whole().log_images({"seen": []})
    with pytest.raises(Unsupported, match="'whole' does not record tables"):
        Whole().log_table("rows")


def test_an_absent_library_is_an_error_that_says_how_to_install_it() -> None:
    with pytest.raises(BadInput, match=r"pip install \"anytrain\[trackers\]\""):
        library("no_such_library_here", "wandb")


def test_a_plain_folder_with_a_librarys_name_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_tracking_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("some_tracking_library")


def test_importing_the_trackers_loads_no_tracking_library() -> None:
    code = (
        "import sys; import anytrain.engine.recording.trackers as t; t.available();"
        "print([m for m in ('tensorboard', 'wandb', 'mlflow', 'trackio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
