"""`Trainer.preflight()`: what awaits a Trainer on devices that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anytrain.doors.trainer import preparing, rehearsal
from anytrain.engine.prepared.model import move
from anytrain.engine.prepared.optimizer import follow
from anytrain.insight.preflight.claimed_ops import claim_weights
from anytrain.insight.preflight.observer import present
from anytrain.insight.preflight.report import Report, foretold
from anytrain.insight.preflight.run import Start, preflight_of
from anytrain.insight.preflight.targets import parse_targets
from anytrain.insight.preflight.trace import trace_call
from anytrain.insight.preflight.words import size

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


class Foretelling:
    """What a Trainer can say of its training before it begins."""

    def preflight(
        self: Any,
        targets: str | Sequence[str] = (),
        *,
        num_processes: int | None = None,
        quick: bool = False,
        thorough: bool = False,
    ) -> Report:
        """Return what awaits this training on targets such as "mps:16GB"; without any, here.

        Two steps and one batch of evaluation are traced in a copy of this process: nothing is
        trained, and the Trainer stays as it is. All that is written is what was foretold of the
        memory: preflight.json in `output_dir`, for the day on which it turns out otherwise. Print
        the report, or ask it for `as_json()` or `as_html()`. A quick one does not look for the
        largest batch, a thorough one looks for it with bf16 and activation checkpointing, too.
        `num_processes` says how many will train together; without it, as many as do now.

        Args:
            targets: Devices and their memory, such as "mps:16GB" or ["cuda:24GB",
                "tpu:v5e"]. None: this machine's device.
            num_processes: How many processes will train together. None: as many as now.
            quick: Skip the search for the largest batch.
            thorough: Search for the largest batch with bf16 and activation checkpointing
                too.
        """
        words = (targets,) if isinstance(targets, str) else tuple(targets)
        return preflight_of(
            lambda target, setting: trace_call(target, lambda: _rehearsed(self), setting),
            parse_targets(words),
            start=Start(num_processes or self.args.world_size),
            quick=quick,
            thorough=thorough,
        )

    def _was_split(self: Any, parts: int) -> None:
        """Tell that batches are cut from now on, and keep it in the run's record."""
        preparing.tell_split(self.args.train_batch_size, parts)
        self._note_full(f"in {parts} parts")

    def _was_checkpointed(self: Any, number: int, total: int) -> None:
        """Tell that blocks are computed again from now on, and keep it in the run's record."""
        preparing.tell_checkpointed(self.args.train_batch_size, number, total)
        self._note_full(f"{number} of {total} blocks computed again")

    def _note_full(self: Any, instead: str) -> None:
        size, session = self.args.train_batch_size, self._session
        told = foretold(self.args.output_dir, session.backend.name)
        why = f"the memory was full with a batch of {size}{_missed(told, size)}"
        session.revise("batch", instead, why, step=self._progress.step)


def _missed(told: Mapping[str, Any] | None, batch_size: int) -> str:
    """Say what a preflight had foretold of a memory that is full, if one was made."""
    if told is None:
        return ""
    needed = size(int(told["needed_bytes"]))
    if told.get("fits") is None:
        return f"; a preflight had foretold {needed}"
    right = "fits" if told["fits"] else "does not fit"
    same = "" if told.get("batch_size") == batch_size else f" of {told.get('batch_size')}"
    return f"; a preflight had foretold {needed}, and that a batch{same} {right} {told['target']}"


def _rehearsed(trainer: Trainer) -> None:
    """Begin the training anew on the claimed device, in the copy that is watched."""
    observer = present()
    trainer.args = rehearsal.arguments(trainer.args, observer)
    trainer._asked = None  # the device is another one: the session is opened again
    trainer._follow_arguments()
    trainer._new_run()
    moved = move(trainer.model, trainer._session.device)
    moved |= claim_weights(trainer.model, observer.recorder.device)  # of a CPU nothing had to move
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer is not None:
        optimizer.state.clear()
        follow(optimizer, moved)
    trainer.train()
