"""What is kept on disk comes back as it was, or is made again."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from anytrain.core import environment
from anytrain.core.errors import Notice
from anytrain.engine.data import cache as caches
from anytrain.engine.data.cache import ArrayCache

MADE = {"ids": np.arange(7, dtype=np.int32), "empty": np.zeros(0), "half": np.ones(3, np.float16)}


def never() -> dict[str, np.ndarray]:
    raise AssertionError("it is there already")


def test_arrays_come_back_from_the_disk_with_their_types(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path / "deep" / "down")
    first = cache.get("key", lambda: MADE)
    again = cache.get("key", never)
    assert (first.was_there, again.was_there) == (False, True)
    for name, array in MADE.items():
        assert again.arrays[name].dtype == array.dtype
        assert np.array_equal(again.arrays[name], array)
    assert not cache.get("other", lambda: MADE).was_there
    assert {file.suffix for file in cache.folder.iterdir()} == {".arrays"}


def test_what_is_read_lies_on_the_disk_and_cannot_be_written_to(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path)
    cache.get("key", lambda: MADE)
    ids = cache.get("key", never).arrays["ids"]
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-128] ^= 1  # the first number: two arrays of 64 bytes each lie at the end
    file.write_bytes(data)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _other(file: Path) -> None:
    file.write_bytes(b"something else entirely" * 40)


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _other])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: object) -> None:
    cache = ArrayCache(tmp_path)
    cache.get("key", lambda: MADE)
    damage(tmp_path / "key.arrays")  # type: ignore[operator]
    assert not cache.get("key", lambda: MADE).was_there
    assert np.array_equal(cache.get("key", never).arrays["ids"], MADE["ids"])


def test_fresh_makes_it_anew_and_replaces_it(tmp_path: Path) -> None:
    ArrayCache(tmp_path).get("key", lambda: MADE)
    newer = {"ids": np.zeros(2, dtype=np.int32)}
    assert not ArrayCache(tmp_path, fresh=True).get("key", lambda: newer).was_there
    assert ArrayCache(tmp_path).get("key", never).arrays["ids"].tolist() == [0, 0]


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = ArrayCache(tmp_path / "file" / "tokens")
    for _ in range(2):
        with pytest.warns(Notice, match="not kept for the next run.*ANYTRAIN_CACHE"):
            assert not cache.get("key", lambda: MADE).was_there


def test_an_error_while_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise OSError("the tokenizer's own")

    with pytest.raises(OSError, match="the tokenizer's own"):
        ArrayCache(tmp_path).get("key", fails)
    assert not list(tmp_path.glob("*.arrays"))


def test_the_files_unused_for_longest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ArrayCache(tmp_path)
    for number, key in enumerate(("old", "older", "used")):
        cache.get(key, lambda: MADE)
        os.utime(tmp_path / f"{key}.arrays", (1000 - number, 1000 - number))
    cache.get("used", never)
    size = (tmp_path / "old.arrays").stat().st_size
    monkeypatch.setattr(caches, "_MOST_BYTES", 3 * size)
    cache.get("new", lambda: MADE)
    assert sorted(file.stem for file in tmp_path.glob("*.arrays")) == ["new", "old", "used"]


def test_a_file_of_somebody_else_is_read_though_its_use_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    cache = ArrayCache(tmp_path)
    cache.get("key", lambda: MADE)
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get("key", never).was_there


def test_what_a_killed_process_left_half_written_goes_after_a_while(tmp_path: Path) -> None:
    left, going_on = tmp_path / "a.17.part", tmp_path / "b.18.part"
    for file in (left, going_on):
        file.write_bytes(b"half")
    os.utime(left, (1000, 1000))
    ArrayCache(tmp_path).get("key", lambda: MADE)
    assert not left.exists()
    assert going_on.exists()


def test_a_file_that_another_process_removes_meanwhile_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "gone.arrays").symlink_to(tmp_path / "nowhere")  # listed, but not there
    cache = ArrayCache(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.get("key", lambda: MADE).was_there
    assert cache.get("key", never).was_there


def _ask(folder: Path, made: Path, told: multiprocessing.Queue) -> None:
    def make() -> dict[str, np.ndarray]:
        time.sleep(0.3)
        with made.open("a") as file:
            file.write("made\n")
        return MADE

    told.put(ArrayCache(folder).get("key", make).was_there)


def test_of_several_processes_one_makes_it_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told, made = context.Queue(), tmp_path / "made.txt"
    others = [context.Process(target=_ask, args=(tmp_path, made, told)) for _ in range(3)]
    for other in others:
        other.start()
    answers = sorted(told.get(timeout=240) for _ in others)
    for other in others:
        other.join()
    assert made.read_text() == "made\n"
    assert answers == [False, True, True]


def test_the_user_says_where_things_are_kept() -> None:
    assert environment.cache_folder({"ANYTRAIN_CACHE": "/one"}) == Path("/one")
    assert environment.cache_folder({"XDG_CACHE_HOME": "/two"}) == Path("/two/anytrain")
    assert environment.cache_folder({}).parts[-2:] == (".cache", "anytrain")
