"""What a Trainer's record of its time holds besides the times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anytrain.core.clock import OUTSIDE
from anytrain.engine.assemble import timing
from anytrain.engine.recording.timesheet import Timesheet
from anytrain.insight.report.why import judge

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_WORTH_A_REMARK_S = 10.0
# What a remedy may have to do with.
_SETTINGS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "async_save",
    "logging_steps",
    "push_to_hub",
)


@contextmanager
def recorded(trainer: Trainer) -> Iterator[None]:
    """Keep the record of a training in its folder; the time after it is the user's own."""
    ledger, first = trainer._session.ledger, trainer.state.global_step
    sheet = None
    if trainer.args.output_dir is not None:
        sheet = timing.timesheet(
            trainer._session,
            trainer._get_output_dir(trainer._trial),
            begin=lambda: {"step": first, **_begin(trainer)},
            standing=lambda: _standing(trainer),
        )
        sheet.start()
    else:
        ledger.begin()
    trainer._timesheet = trainer._between.timesheet = sheet
    trainer._begin_start()
    how, failure = "failed", None
    try:
        yield
        how = "finished"
    except (SystemExit, KeyboardInterrupt):
        how = "stopped"
        raise
    except Exception as error:
        failure = error
        raise
    finally:
        if sheet is not None:
            sheet.end(how, failure)
        failure = None  # its traceback holds this frame
        if trainer._record is not None:
            trainer._record.end()
        ledger.rest(OUTSIDE)


def remark(sheet: Timesheet | None) -> str | None:
    """Return where the time went, in a line, if something other than the step took much of it."""
    if sheet is None or sheet.seconds_since_start() < _WORTH_A_REMARK_S:
        return None
    finding = judge(sheet.life())
    return None if finding is None or finding.is_step else finding.line()


def _begin(trainer: Trainer) -> Mapping[str, Any]:
    args = trainer.args
    return {
        "max_steps": trainer.state.max_steps,
        "samples_per_step": trainer._samples_per_step(),
        "settings": {name: _plain(getattr(args, name)) for name in _SETTINGS},
    }


def _standing(trainer: Trainer) -> Mapping[str, Any]:
    loaders = trainer._run.loaders
    shapes = ["x".join(map(str, shape)) for shape in trainer._flos_of if shape is not None]
    return {
        "step": trainer._progress.step,
        "epoch": trainer._progress.epochs,
        "shapes": shapes,
        "padding_share": trainer._padding.share,
        "workers": getattr(loaders[0], "num_workers", None) if loaders else None,
    }


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
