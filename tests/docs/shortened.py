"""Run a script whose Trainer logs soon and stops after some steps: `shortened.py 20 train.py`."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from anytrain import Trainer, TrainerCallback

_LOGS_EVERY = 10


class Stops(TrainerCallback):
    """Stop so many steps after the first of this process."""

    def __init__(self, most: int) -> None:
        self.left = most

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.left -= 1
        control.should_log = control.should_log or state.global_step % _LOGS_EVERY == 0
        control.should_training_stop = self.left <= 0
        control.should_save = control.should_save or self.left == 0


def main() -> None:
    _, most, script, *words = sys.argv
    make = Trainer.__init__

    def shortened(self: Trainer, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.add_callback(Stops(int(most)))

    Trainer.__init__ = shortened  # type: ignore[method-assign]
    sys.argv = [script, *words]
    sys.path[0] = "."
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
