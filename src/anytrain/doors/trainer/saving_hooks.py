"""The pieces of saving and resuming that go by HF's names, called where HF calls them.

A subclass may override each of them: `super()` then does anytrain's work, and without it the
piece is the subclass's alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from anytrain.core.errors import WrongOrder
from anytrain.doors.callbacks import Callbacks
from anytrain.doors.trainer import adapters
from anytrain.doors.trainer.best import Best
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.run import Run
from anytrain.engine.checkpoint import huggingface

_OPTIMIZING = ("optimizer", "scheduler")


class Pieces(Best):
    """What of a checkpoint is saved and loaded by methods that may be overridden."""

    model: nn.Module
    callback_handler: Callbacks
    save_model: Callable[..., None]
    _save: Callable[..., None]
    _run: Run
    _as_made: Mapping[str, Any]
    _keeps_optimizers: bool | None = None
    """During a save: whether the optimizers go into the checkpoint; None outside."""

    # -- what may be overridden -----------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str | os.PathLike[str], model: nn.Module | None = None
    ) -> None:
        """Put a checkpoint's weights into the model, before an optimizer is made for them."""
        target = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        saved = self._opened(folder)
        if adapters.has_adapters(target):
            adapters.load(target, str(folder))
        elif isinstance(saved, checkpoint.Loaded) and saved.num_models:
            saved.load_model(target)
        else:
            checkpoint.load_weights(target, huggingface.read_model(folder), source=str(folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Put the optimizer and its schedule back, once both are made."""
        if checkpoint is not None:
            run_state.restore_optimizers(self._run, self._opened(Path(checkpoint)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Let the optimizer and its schedule go into the checkpoint that is being written."""
        if self._keeps_optimizers is None:
            raise WrongOrder(
                "Cannot save an optimizer outside a checkpoint.",
                why="its state is one part of a checkpoint, which is written whole.",
                fix="set trainer.control.should_save = True in a callback, or torch.save it.",
            )
        self._keeps_optimizers = True

    def _load_callback_state(self) -> None:
        """Make the callbacks again as the state has them, where the arguments ask for it."""
        if self.args.restore_callback_states_from_checkpoint:
            self.callback_handler.restore(self.state.stateful_callbacks)

    # -- what calls it --------------------------------------------------------------------------

    def _is_own(self, name: str) -> bool:
        """Whether a method is a subclass's, or was put on this very Trainer or its class."""
        return getattr(getattr(self, name), "__func__", None) is not self._as_made[name]

    def _saves_own_way(self) -> bool:
        return self._is_own("save_model") or self._is_own("_save")

    def _has_own_model(self) -> bool:
        """Whether a checkpoint's model is written and read by a user's code alone."""
        return self._saves_own_way() and self._is_own("_load_from_checkpoint")

    def _load_own_model(self, path: Path | None) -> None:
        """Let a user's own code load the model, which may change it before it is prepared."""
        if path is not None and self._is_own("_load_from_checkpoint"):
            self._load_from_checkpoint(str(path))

    def _load_weights(self, path: str) -> None:
        """Put the weights of a checkpoint of this run into the model."""
        if self._has_own_model():
            self._opened(Path(path))  # refused where it is damaged
            self._load_from_checkpoint(path)
        else:
            Pieces._load_from_checkpoint(self, path)

    def _own_ways(self, path: Path) -> run_state.OwnWays:
        """Return what of a resumed run is left to a user's own code."""
        load = partial(self._load_optimizer_and_scheduler, str(path))
        return run_state.OwnWays(
            has_model=self._is_own("_load_from_checkpoint"),
            optimizers=load if self._is_own("_load_optimizer_and_scheduler") else None,
        )

    def _save_pieces(self, taken: checkpoint.Snapshot, folder: Path) -> checkpoint.Snapshot:
        """Let a user's own code write its pieces; leave out of ours what it has not asked for."""
        if self.args.save_only_model or not self._is_own("_save_optimizer_and_scheduler"):
            return taken
        self._keeps_optimizers = False
        try:
            self._save_optimizer_and_scheduler(str(folder))
            keeps = self._keeps_optimizers
        finally:
            self._keeps_optimizers = None
        if keeps:
            return taken
        parts = {k: v for k, v in taken.parts.items() if k.split("_")[0] not in _OPTIMIZING}
        return replace(taken, parts=parts)

    def _load_hooks(self) -> list[run_state.LoadHook]:
        """Return what loads models besides anytrain's own way."""
        own = self._is_own("_load_from_checkpoint") or adapters.has_adapters(self.model)
        return [self._load_itself] if own else []

    def _load_itself(self, models: list[Any], folder: str) -> None:
        self._load_from_checkpoint(folder)
        models.clear()

    def _opened(self, path: Path) -> checkpoint.Loaded | huggingface.HFCheckpoint:
        if huggingface.is_hf_folder(path):
            return huggingface.read(path)
        return checkpoint.load(path, world=self._session.world)
