"""The file layer: what is written is on the disk, and what is read is what was checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from anytrain.engine.checkpoint import files
from anytrain.engine.checkpoint.files import Damaged, Fingerprint


@pytest.mark.parametrize("sizes", [[], [0], [5], [3, 0, 4], [2**20], [7, 2**20 + 1, 9, 3]])
def test_chunks_of_any_size_make_one_file_with_its_fingerprint(
    tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 300_000)
    chunks = [os.urandom(size) for size in sizes]
    found = files.write_file(tmp_path / "x", chunks)
    whole = b"".join(chunks)
    assert (tmp_path / "x").read_bytes() == whole
    assert found == Fingerprint(len(whole), hashlib.blake2b(whole, digest_size=32).hexdigest())
    assert files.read_checked(tmp_path, "x", found) == whole
    assert files.fingerprint(tmp_path, "x") == found
    files.check_file(tmp_path, "x", found)


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write", lambda fd, data: os.write(fd, data[:7]))
    files.write_file(tmp_path / "x", [b"abcdefghij" * 10])
    assert (tmp_path / "x").read_bytes() == b"abcdefghij" * 10


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        files.write_file(tmp_path / "x", [b"yours"])


def test_two_folders_change_names_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    if files.swap_names(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "a" / "who").read_text() == "b"
        assert (tmp_path / "b" / "who").read_text() == "a"
    with pytest.raises(FileNotFoundError):
        files.swap_names(tmp_path / "a", tmp_path / "nobody")


def _planted(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"12345678")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("link", "symbolic link"),
        ("up/secret", "symbolic link"),
        ("pipe", "not a plain file"),
        ("inner", "not a plain file"),
        ("nobody", "missing"),
        ("nobody/x", "missing"),
    ],
)
def test_a_file_is_read_only_from_inside_its_folder(tmp_path: Path, name: str, why: str) -> None:
    folder = _planted(tmp_path)
    expected = files.fingerprint(tmp_path, "secret")
    for look in (files.read_checked, files.check_file, files.check_size):
        with pytest.raises(Damaged, match=why):
            look(folder, name, expected)


def test_removing_a_tree_follows_no_link(tmp_path: Path) -> None:
    folder = _planted(tmp_path)
    files.remove_tree(folder)
    assert not folder.exists()
    assert (tmp_path / "secret").exists()
