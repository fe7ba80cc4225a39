"""Checkpoints that are whole or absent, hold no pickle, and load nothing that was damaged.

A checkpoint is one folder: data files, then `manifest.json` with every file's size and
checksum, then one rename. What has no manifest was never written.

    from anytrain.engine.checkpoint import Retention, SaveFailed, Snapshot, Store

    store = Store("runs/demo", retention=Retention(keep_last=3))

    # Every rank calls save with the same name: it is one collective operation.
    outcome = store.save(
        "step-000100",
        Snapshot(
            step=100,
            models=[model],                                  # written by rank 0
            parts={"optimizer": optimizer.state_dict()},     # written by rank 0
            rank_parts={"rng": rng_state()},                 # written by every rank, its own
            meta={"plan": {"precision": "bf16"}},            # goes into the manifest
            metrics={"loss": 0.25},
        ),
        world=world,
    )
    if isinstance(outcome, SaveFailed):     # no room, a failing disk, a NaN: training goes on
        warnings.warn(str(outcome), Notice)

    newest = store.newest_whole(world=world)    # .path is None where nothing is whole
    for damage in newest.passed_over:
        print(damage)                           # the path, the file at fault, and why
    loaded = store.load(newest, world=world)    # or a name; `load(path)` for any folder
    loaded.load_model(model)                    # the first one; load_model(other, 1)
    optimizer.load_state_dict(loaded.part("optimizer"))
    if loaded.world_size == world.size:
        restore_rng(loaded.rank_part("rng", world.rank))
    loaded.step, loaded.meta, loaded.metrics, loaded.path, loaded.part_names

What each call promises:

- `save(name, snapshot, *, world=None) -> Saved | SaveFailed`, the same answer on every rank.
  `snapshot` may also be a function `folder -> Snapshot`: it is called on every rank with the
  folder being written, so that a hook's own files are committed (and checked) with the rest.
  A value that no file can hold raises CheckpointError with its path, on every rank.
- `save(path, snapshot, *, world=None)` and `load(path, *, world=None)` at module level do the
  same for a folder anywhere.
- `check(state, "scheduler")` raises the same CheckpointError early, at registration.
- `Snapshot.models` takes modules, `model_state(module, weights)` where hooks have
  changed the weights, or plain state dicts. The first becomes `model.safetensors` and
  `config.json`, so `AutoModel.from_pretrained(folder)` works; the next `model_1.safetensors`.
- `Snapshot.finite` names the parts that must hold no NaN or infinity (by default those whose
  name starts with "optimizer"); weights always must, and buffers must hold no NaN.
- `Writer(store, world=world, synchronize=...)` saves behind the loop: `begin(name, snapshot)`,
  `poll() -> Saved | SaveFailed | None` at each step, `finish() -> list of outcomes` at the end.
- `huggingface.read(folder)` takes what it safely can of a Trainer's or an Accelerate folder.
- `loaded.part(name)` raises CheckpointError naming the parts there are, never returns a default.

Names are loaded when first used: listing and verifying need no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Loaded": "store",
    "Newest": "catalog",
    "PassedOver": "catalog",
    "Retention": "catalog",
    "SaveFailed": "saving",
    "Saved": "saving",
    "Snapshot": "snapshot",
    "Store": "store",
    "Writer": "store",
    "check": "encode",
    "check_fit": "model",
    "load": "store",
    "load_weights": "model",
    "model_state": "model",
    "save": "store",
    "verify": "catalog",
}

if TYPE_CHECKING:
    from anytrain.engine.checkpoint.catalog import (
        Newest as Newest,
        PassedOver as PassedOver,
        Retention as Retention,
        verify as verify,
    )
    from anytrain.engine.checkpoint.encode import check as check
    from anytrain.engine.checkpoint.model import (
        check_fit as check_fit,
        load_weights as load_weights,
        model_state as model_state,
    )
    from anytrain.engine.checkpoint.saving import Saved as Saved, SaveFailed as SaveFailed
    from anytrain.engine.checkpoint.snapshot import Snapshot as Snapshot
    from anytrain.engine.checkpoint.store import (
        Loaded as Loaded,
        Store as Store,
        Writer as Writer,
        load as load,
        save as save,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value
