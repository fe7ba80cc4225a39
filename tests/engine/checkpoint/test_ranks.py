"""A save by two ranks is one operation: both write, both learn how it went."""

from __future__ import annotations

import json
from pathlib import Path

from anytrain.engine.checkpoint import Store, load
from checkpoints import hidden
from launching import launch

SCRIPT = """
import errno, json, os, sys, time
from pathlib import Path
import torch
from anytrain.core import environment
from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import SaveFailed, Saved, Snapshot, Store, Writer, files
from anytrain.machine.parallel.torch_dist import join

root = Path(sys.argv[1])
place = environment.read().place
world = join(place, "gloo", torch.device("cpu"), stall_s=0)
rank = world.rank
store = Store(root)
said = {}

def tell(name, outcome):
    said[name] = [type(outcome).__name__, getattr(outcome, "kind", None), str(outcome)]

def snapshot(step, rank_parts=None):
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    own = {"rng": {"rank": rank, "state": torch.rand(4)}} if rank_parts is None else rank_parts
    return Snapshot(step=step, models=[model], parts={"optimizer": {"from": rank}}, rank_parts=own)

tell("plain", store.save("plain", snapshot(1), world=world))

real = files.write
def full(descriptor, data):
    if rank == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(descriptor, data)
files.write = full
tell("full", store.save("full", snapshot(2), world=world))
files.write = real

def hook(folder):
    (folder / f"hook-{rank}.txt").write_text(str(rank))
    return snapshot(3)
tell("hooked", store.save("hooked", hook, world=world))

def failing(folder):
    if rank == 1:
        raise ZeroDivisionError("rank 1 has its own trouble")
    return snapshot(4)
for name, source in {"failing": failing, "unequal": snapshot(5, {f"part{rank}": 1})}.items():
    try:
        store.save(name, source, world=world)
    except (ZeroDivisionError, CheckpointError) as error:
        said[name] = [type(error).__name__, str(error)]

here = Store(root if rank == 0 else root.with_name("another disk"))
tell("unshared", here.save("unshared", snapshot(6), world=world))

writer = Writer(store, world=world)
writer.begin("behind", snapshot(7))
torch.ones(1) + world.reduce(torch.ones(1), "sum")  # the loop's own collectives go on
tell("behind", writer.finish()[0])

newest = store.newest_whole(world=world)
said["newest"] = newest.path.name
loaded = store.load(newest, world=world)
said["rng"] = loaded.rank_part("rng", rank)["rank"]
if rank == 0:
    os.truncate(root / "hooked" / "state-rank1.safetensors", 3)
world.barrier("damage done")
try:
    store.load("hooked", world=world)
except CheckpointError as error:
    said["damaged"] = str(error)
Path(root.parent / f"said-{rank}.json").write_text(json.dumps(said))
world.close()
"""


def test_two_ranks_save_together(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    launch(SCRIPT, 2, root)
    said = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1)]
    for name in ("plain", "hooked", "behind"):
        assert [words[name][0] for words in said] == ["Saved", "Saved"], said
    for name, kind in {"full": "space", "unshared": "not-shared"}.items():
        assert [words[name][:2] for words in said] == [["SaveFailed", kind]] * 2
        assert said[0][name] == said[1][name] or name == "unshared"
    assert said[1]["failing"][0] == "ZeroDivisionError"
    assert said[0]["failing"][0] == "CheckpointError"
    assert "rank 1 stopped with ZeroDivisionError" in said[0]["failing"][1]
    assert [words["unequal"][0] for words in said] == ["CheckpointError"] * 2
    assert [words["newest"] for words in said] == ["behind", "behind"]
    assert [words["rng"] for words in said] == [0, 1]
    assert all("state-rank1.safetensors" in words["damaged"] for words in said)

    assert sorted(p.name for p in root.iterdir()) == ["behind", "hooked", "plain"]
    assert hidden(root) == []
    loaded = load(root / "plain")
    assert loaded.world_size == 2
    assert loaded.part("optimizer") == {"from": 0}
    assert [loaded.rank_part("rng", rank)["rank"] for rank in (0, 1)] == [0, 1]
    entries = {entry.name: entry.manifest for entry in Store(root).entries()}
    assert {"hook-0.txt", "hook-1.txt"} <= set(entries["hooked"].files)
