"""Every file of a checkpoint damaged in turn: always detected, never loaded, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import Saved, Snapshot, Store, catalog, files, load, manifest
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest
from checkpoints import fingerprint, small_run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two whole checkpoints, `old` and the newer `new`; shards included."""
    root = tmp_path_factory.mktemp("two")
    store = Store(root, most_shard_bytes=300)
    for seed, name in enumerate(("old", "new")):
        assert isinstance(store.save(name, small_run(seed).snapshot(seed + 1)), Saved)
    return root


FILES = [
    "manifest.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer-00001-of-00003.safetensors",
    "optimizer-00002-of-00003.safetensors",
    "optimizer-00003-of-00003.safetensors",
    "state-00001-of-00002.safetensors",
    "state-00002-of-00002.safetensors",
    "state.json",
]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << random.Random(position).randrange(8)
    path.write_bytes(data)


def _other(path: Path) -> None:
    """Put the other checkpoint's file of the same name in its place."""
    before = path.read_bytes()
    shutil.copy(path.parents[1] / "old" / path.name, path)
    if path.read_bytes() == before:  # the two happen to be the same
        path.write_bytes(before + b" ")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut in half": lambda p: os.truncate(p, p.stat().st_size // 2),
    "cut by a byte": lambda p: os.truncate(p, p.stat().st_size - 1),
    "emptied": lambda p: os.truncate(p, 0),
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "first bit": lambda p: _flip(p, 0),
    "a bit in the middle": lambda p: _flip(p, p.stat().st_size // 2),
    "last bit": lambda p: _flip(p, p.stat().st_size - 1),
    "zeroed": lambda p: p.write_bytes(b"\0" * p.stat().st_size),
    "deleted": lambda p: p.unlink(),
    "replaced": _other,
    "made a folder": lambda p: (p.unlink(), p.mkdir()),
    "made a link": lambda p: (p.rename(p.with_name("away")), p.symlink_to("away")),
    "made a pipe": lambda p: (p.unlink(), os.mkfifo(p)),
}


def _copy(two: Path, tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    shutil.copytree(two, root)
    return root


def test_the_list_of_files_is_the_real_one(two: Path) -> None:
    assert sorted(p.name for p in (two / "new").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_older_one_is_taken(
    two: Path, tmp_path: Path, damage: str, file: str
) -> None:
    root = _copy(two, tmp_path)
    DAMAGE[damage](root / "new" / file)
    newest = Store(root).newest_whole()
    assert newest.path == root / "old"
    passed = [p for p in newest.passed_over if p.path == root / "new"]
    foreign = damage == "replaced" and file == MANIFEST  # a good manifest of other files
    assert [p.file for p in passed] == [file] or (foreign and len(passed) == 1)
    with pytest.raises(CheckpointError, match="is not whole") as caught:
        load(root / "new")
    assert foreign or file in str(caught.value)


def test_every_single_bit_of_a_manifest_counts(two: Path, tmp_path: Path) -> None:
    raw = (two / "new" / MANIFEST).read_bytes()
    for position in range(0, len(raw) * 8, 41):
        data = bytearray(raw)
        data[position // 8] ^= 1 << position % 8
        (tmp_path / MANIFEST).write_bytes(data)
        with pytest.raises(Damaged):
            manifest.read(tmp_path)


def test_every_damaged_file_is_listed_not_only_the_first(two: Path, tmp_path: Path) -> None:
    root = _copy(two, tmp_path)
    (root / "new" / "model.safetensors.index.json").unlink()
    _flip(root / "new" / "state.json", 3)
    problems = catalog.verify(root / "new")
    assert [(p.file, p.why.split(":")[0]) for p in problems] == [
        ("model.safetensors.index.json", "it is missing"),
        ("state.json", "its bytes changed"),
    ]
    with pytest.raises(CheckpointError, match="7 of its 9 files match"):
        load(root / "new")


def test_a_file_damaged_after_the_check_is_still_never_used(two: Path, tmp_path: Path) -> None:
    root = _copy(two, tmp_path)
    loaded = load(root / "new")
    _flip(root / "new" / "optimizer-00001-of-00003.safetensors", 700)
    with pytest.raises(CheckpointError, match="optimizer-00001-of-00003.safetensors"):
        loaded.part("optimizer")
    loaded.part("scheduler")


def test_files_that_nobody_listed_do_no_harm(two: Path, tmp_path: Path) -> None:
    root = _copy(two, tmp_path)
    before = fingerprint(load(root / "new"))
    (root / "new" / "README.md").write_text("hello")
    assert Store(root).newest_whole().path == root / "new"
    assert fingerprint(load(root / "new")) == before


def test_a_checkpoint_may_be_moved_and_renamed(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "new", tmp_path / "best")
    assert fingerprint(load(tmp_path / "best")) == fingerprint(load(two / "new"))


# A manifest that lies.


def _signed(folder: Path, contents: dict[str, object]) -> None:
    """Write a manifest with a right checksum, as somebody who knows the format could."""
    contents.pop("blake2b", None)
    body = manifest._dump(contents)
    (folder / MANIFEST).write_bytes(manifest._signed(body, manifest._checksum(body)))


BAD_NAMES = [
    "../old/state.json",
    "/etc/hostname",
    "a/../../x",
    "..",
    ".",
    "",
    "a//b",
    "./a",
    "a\\..\\b",
    "C:/x",
    "a\0b",
    "manifest.json",
    "MANIFEST.json",
    "State.json",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_manifest_cannot_name_what_is_outside_its_folder(
    two: Path, tmp_path: Path, name: str
) -> None:
    root = _copy(two, tmp_path)
    contents = json.loads((root / "new" / MANIFEST).read_bytes())
    contents["files"][name] = contents["files"]["state.json"]
    _signed(root / "new", contents)
    with pytest.raises(Damaged):
        manifest.read(root / "new")
    assert Store(root).newest_whole().path == root / "old"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "something else"),
        ("format", 3),
        ("step", "many"),
        ("step", None),
        ("created_ns", []),
        ("files", []),
        ("files", {"x": {"bytes": -1, "blake2b": "0" * 64}}),
        ("files", {"x": {"bytes": 1, "blake2b": "xyz"}}),
        ("files", {"x": {"bytes": True, "blake2b": "0" * 64}}),
        ("models", [{"tensors": ["elsewhere.safetensors"]}]),
        ("parts", {"optimizer": {"document": "../x.json", "tensors": []}}),
        ("rank_parts", {"rng": "state.json"}),
        ("parts", {"x": {"document": "state.json", "tensors": [], "key": 3}}),
        ("metrics", {"loss": {}}),
    ],
)
def test_a_manifest_without_meaning_is_damage(
    two: Path, tmp_path: Path, key: str, value: object
) -> None:
    shutil.copytree(two / "new", tmp_path / "new")
    contents = json.loads((tmp_path / "new" / MANIFEST).read_bytes())
    _signed(tmp_path / "new", {**contents, key: value})
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(tmp_path / "new")


# Pickles.


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("resigned", [False, True], ids=["manifest kept", "manifest resigned"])
@pytest.mark.parametrize("file", FILES)
def test_a_pickle_planted_in_any_file_never_runs(
    two: Path, tmp_path: Path, file: str, resigned: bool
) -> None:
    folder, marker = tmp_path / "new", tmp_path / "it ran"
    shutil.copytree(two / "new", folder)
    contents = manifest.read(folder)
    (folder / file).write_bytes(pickle.dumps(Payload(marker)))
    if resigned and file != MANIFEST:
        fooled = {**contents.files, file: files.fingerprint(folder, file)}
        (folder / MANIFEST).write_bytes(manifest.to_bytes(replace(contents, files=fooled)))
    try:
        loaded = load(folder)
        everything = fingerprint(loaded), loaded.rank_part("rng", 0)
        assert file == "model.safetensors.index.json", everything  # which we never read
    except CheckpointError as error:
        assert file in str(error)
    assert not marker.exists()


def test_the_payload_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_a_manifest_round_trips(two: Path, tmp_path: Path) -> None:
    contents = manifest.read(two / "new")
    odd = replace(contents, metrics={"nan": float("nan"), "inf": float("-inf"), "x": 0.1})
    (tmp_path / MANIFEST).write_bytes(manifest.to_bytes(odd))
    back: Manifest = manifest.read(tmp_path)
    assert repr(back.metrics) == repr(odd.metrics)
    assert replace(back, metrics={}) == replace(contents, metrics={})


def test_an_empty_snapshot_is_a_checkpoint_too(tmp_path: Path) -> None:
    assert isinstance(Store(tmp_path).save("x", Snapshot(step=0)), Saved)
    assert load(tmp_path / "x").part_names == ()
