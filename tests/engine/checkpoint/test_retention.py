"""Which checkpoints stay, and that removing one never costs another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint import Retention, Saved, Snapshot, Store, files
from anytrain.engine.checkpoint.catalog import doomed, prunable
from checkpoints import hidden


def filled(root: Path, losses: list[float], retention: Retention | None = None) -> Store:
    store = Store(root, retention=retention)
    for step, loss in enumerate(losses, start=1):
        snapshot = Snapshot(step=step, parts={"x": step}, metrics={"loss": loss})
        assert isinstance(store.save(f"step-{step}", snapshot), Saved)
    return store


def steps(store: Store) -> list[int]:
    return sorted(entry.manifest.step for entry in store.entries() if entry.manifest)


FIVE = [0.5, 0.1, 0.9, 0.4, 0.3]


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (Retention(), [1, 2, 3, 4, 5]),
        (Retention(keep_last=1), [5]),
        (Retention(keep_last=2), [4, 5]),
        (Retention(keep_last=9), [1, 2, 3, 4, 5]),
        (Retention(keep_last=1, metric="loss"), [2, 5]),
        (Retention(keep_last=1, metric="loss", greater_is_better=True), [3, 5]),
        (Retention(keep_last=1, metric="loss", keep_best=2), [2, 5]),
        (Retention(keep_last=1, metric="accuracy"), [5]),
        (Retention(keep_last=1, keep_every=2), [2, 4, 5]),
        (Retention(keep_last=2, metric="loss", keep_every=3), [2, 3, 4, 5]),
    ],
)
def test_a_rule_leaves_what_it_names(tmp_path: Path, rule: Retention, left: list[int]) -> None:
    store = filled(tmp_path, FIVE, rule)
    assert steps(store) == left
    assert hidden(tmp_path) == []


def test_the_best_is_never_one_that_is_not_a_number(tmp_path: Path) -> None:
    rule = Retention(keep_last=1, metric="loss")
    assert steps(filled(tmp_path, [float("nan"), 0.2, 0.3], rule)) == [2, 3]


def test_a_damaged_one_neither_counts_nor_goes(tmp_path: Path) -> None:
    store = filled(tmp_path, FIVE)
    (tmp_path / "step-5" / "state.json").write_text("")
    (tmp_path / "step-3" / "manifest.json").write_text("")
    going = [entry.name for entry in doomed(store.entries(), Retention(keep_last=2))]
    assert going == ["step-1"]


def test_pruning_spares_the_newest_whose_every_byte_checks(tmp_path: Path) -> None:
    filled(tmp_path, FIVE)
    for name in ("step-5", "step-4"):  # the right size, and the wrong bytes
        (tmp_path / name / "state.json").write_bytes(b'{"x":7}\n')
    going = [entry.name for entry in prunable(tmp_path, Retention(keep_last=1))]
    assert going == ["step-1", "step-2", "step-4"]


def test_nothing_goes_before_the_new_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, FIVE, Retention(keep_last=5))
    store.retention = Retention(keep_last=1)
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    store.save("step-6", Snapshot(step=6))
    assert steps(store) == [1, 2, 3, 4, 5]


def test_an_old_one_that_cannot_be_removed_is_a_note_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, FIVE)
    store.retention = Retention(keep_last=5)

    def refused(path: Path) -> None:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(files, "unlink", refused)
    outcome = store.save("step-6", Snapshot(step=6))
    assert isinstance(outcome, Saved)
    assert "cannot remove" in outcome.notes[0]
    assert steps(store) == [2, 3, 4, 5, 6]  # it is hidden already, and cleared by a later save
    monkeypatch.undo()
    assert isinstance(store.save("step-7", Snapshot(step=7)), Saved)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("rule", [{"keep_last": 0}, {"keep_best": 0}, {"keep_every": -1}])
def test_a_rule_that_would_keep_nothing_is_refused(rule: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Retention(**rule)


def test_what_a_user_has_put_there_neither_counts_nor_goes(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    store = filled(root, FIVE)
    shutil.copytree(root / "step-1", root / "my-safe-copy")
    shutil.copytree(root / "step-1", root / "step-1-backup")
    shutil.copytree(root / "step-2", elsewhere)
    (root / "step-99").symlink_to(elsewhere)
    kept = sorted(path.name for path in elsewhere.iterdir())
    store.retention = Retention(keep_last=2)
    assert isinstance(store.save("step-6", Snapshot(step=6)), Saved)
    left = {path.name for path in root.iterdir()}
    assert left == {"step-5", "step-6", "my-safe-copy", "step-1-backup", "step-99"}
    assert sorted(path.name for path in elsewhere.iterdir()) == kept


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("kept")
    (tmp_path / "link").symlink_to("real")
    files.remove_tree(tmp_path / "link")
    assert (tmp_path / "real" / "file").read_text() == "kept"
    assert not (tmp_path / "link").is_symlink()
