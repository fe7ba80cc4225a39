"""Take a script over at its first training step, and hold that step against the CPU's.

The script runs as it is, on this machine's device, until a model with weights to learn is called
in training mode. The call's own arguments are the batch; nothing is trained, and a Trainer writes
to a folder that is removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from anytrain.core.errors import BadInput
from anytrain.engine.assemble import session as sessions
from anytrain.insight.program import run_program
from anytrain.insight.proofs.parity import OutputLoss, Parity, compare

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Compared(BaseException):
    """The step was compared: leave the script, whatever it is doing."""

    def __init__(self, parity: Parity) -> None:
        super().__init__()
        self.parity = parity


class _TakeoverObserver:
    """Let a script run to its first training step, and no further; it writes to the folder."""

    is_watching = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._has_begun = False

    def begin(self) -> bool:
        """Whether this training is the first one."""
        is_first, self._has_begun = not self._has_begun, True
        return is_first

    def tell(self, **facts: Any) -> None:
        """Take down what the run says of itself; what was said first stays."""
        self.facts = {**facts, **self.facts}

    def end_steps(self) -> None:
        """Do nothing: no step is recorded."""

    def leave(self) -> NoReturn:
        """Leave the script: it has trained without a model to compare."""
        raise SystemExit(0)

    def skips_save(self) -> bool:
        """Let no file of the user's be written."""
        return True


def compare_script(
    command: Sequence[str],
    precision: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Parity:
    """Run a script (or "-m" and a module) up to its first training step; return how it compares.

    `precision` takes the place of the run's own. `say` is told what is going on.
    """
    say("running the script up to its first training step")
    with tempfile.TemporaryDirectory() as folder:
        own = _TakeoverObserver(folder)
        try:
            # Not a hook: those for all modules are not told the arguments that have names.
            taking_over = mock.patch.object(
                nn.Module, "__call__", _taking_over(own, precision, say)
            )
            with sessions.observed_by(own), taking_over:
                run_program(command)
        except _Compared as done:
            return done.parity
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    raise BadInput(
        f"{command[0]} has not trained.",
        why="it ended before a model with weights to learn was called in training mode.",
        fix="pass the options with which it trains, such as --do_train.",
    )


def _taking_over(own: _TakeoverObserver, precision: str | None, say: Callable[[str], None]) -> Any:
    """Return a call of modules whose first one in training is compared instead."""
    call: Any = nn.Module.__call__
    taken: list[nn.Module] = []

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if taken or not _is_training(module):
            return call(module, *args, **kwargs)
        taken.append(module)
        model: nn.Module = getattr(module, "_orig_mod", module)  # what torch.compile was given
        say("computing the step on the device and on the CPU, module by module")
        raise _Compared(_compared(model, args, kwargs, precision or _precision_of(own, model)))

    return called


def _is_training(module: nn.Module) -> bool:
    learns = any(parameter.requires_grad for parameter in module.parameters())
    return learns and module.training and torch.is_grad_enabled()


def _compared(model: nn.Module, args: Any, kwargs: Any, precision: str) -> Parity:
    loss_of = OutputLoss(lambda copy, batch: copy(*batch[0], **batch[1]))
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        return compare(model, (args, kwargs), loss_of, device, precision)


def _precision_of(own: _TakeoverObserver, model: nn.Module) -> str:
    """Return how the run computes: as it said of itself, or as autocast is set just now."""
    told = own.facts.get("precision")
    if told is not None:
        return str(told)
    kind = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(kind):
        return "no"
    return _NAMES.get(torch.get_autocast_dtype(kind), "no")
