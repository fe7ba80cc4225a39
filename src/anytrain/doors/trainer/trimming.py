"""Find out whether padding is read by anybody; cut it where it is not.

A model is shown not to read masked columns by a trial on a few rows: loss and gradients (in an
evaluation, loss and predictions) with the columns and without them are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from anytrain.engine.data.trimming import PaddingTrim
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.prepared.model import meets_other_ranks
from anytrain.engine.step import ranges
from anytrain.engine.step.activations import is_compiled
from anytrain.engine.tree import batch_size, leaves, take_rows

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_ROWS = 4
_MOST_VALUES = 2**26
"""Of the gradients that are compared: 256 MB."""
_EXACT, _ROUGH = 1e-3, 3e-2
"""How far results may be apart, in float32 on a CPU and elsewhere."""
_READS = ("training_step", "compute_loss", "prediction_step", "_prepare_inputs", "_prepare_input")


def in_training(trainer: Trainer, loader: PreparedLoader) -> None:
    """Let a training's loader cut its batches, unless they must stay as they are."""
    if _stay_whole(trainer) or trainer.args.include_num_input_tokens_seen not in (False, "no"):
        return
    model = trainer._run.unwrap(trainer.model_wrapped, keep_forward=True, keep_compiled=False)
    if any(isinstance(module, _NormBase) for module in model.modules()):
        return  # its statistics are taken over all columns while it trains

    def learnt(batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters = _some([p for p in model.parameters() if p.requires_grad])
        loss = trainer.compute_loss(model, trainer._prepare_inputs(batch)).mean()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss.detach()], [gradient for gradient in found if gradient is not None]

    def tell(differs: str | None) -> None:
        value, because = "trimmed", "columns that every row masks are cut: loss and gradients of "
        because += f"{_ROWS} rows were the same without them (trim_padding=False keeps them)"
        if differs is not None:
            value, because = "any", f"masked columns are computed: {differs} without them"
        trainer._session.revise("shapes", value, because, trainer.state.global_step)

    loader.walk.trim = PaddingTrim(_trial(trainer, model, learnt), tell)


def in_evaluation(
    trainer: Trainer, loader: Any, model: nn.Module, only_loss: bool, ignore_keys: list[str] | None
) -> None:
    """Let an evaluation's loader cut its batches, unless they must stay as they are."""
    if not isinstance(loader, PreparedLoader):
        return
    loader.walk.trim = None
    if _stay_whole(trainer) or "inputs" in trainer.args.include_for_metrics:
        return

    def predict(batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        predicted = trainer.prediction_step(model, batch, only_loss, ignore_keys=ignore_keys)
        found = [leaf for leaf in leaves(predicted) if isinstance(leaf, torch.Tensor)]
        return [], [tensor.float() for tensor in found]

    loader.walk.trim = PaddingTrim(_trial(trainer, model, predict), lambda differs: None)


def _stay_whole(trainer: Trainer) -> bool:
    """Whether batches must keep their columns whatever the model reads."""
    args, session = trainer.args, trainer._session
    if not args.trim_padding or args.length_buckets is not None:
        return True
    if args.neftune_noise_alpha is not None:  # its noise is by the length
        return True
    traces = session.end_step is not None or session.graphs is not None
    compiles = session.plan.step.value == "compiled" or any(
        map(is_compiled, trainer.model.modules())
    )
    own = any(map(trainer._is_own, _READS))
    own = own or getattr(args, "predict_with_generate", False)
    return (
        traces
        or compiles
        or own
        or session.observer.is_watching
        or meets_other_ranks(trainer.model)
    )


def _trial(
    trainer: Trainer,
    model: nn.Module,
    compute: Callable[[Any], tuple[list[torch.Tensor], list[torch.Tensor]]],
) -> Callable[[Any, Any], str | None]:
    """Return what compares a few rows of a batch, whole and cut."""
    session = trainer._session
    is_exact = session.device.type == "cpu" and not session.precision.is_mixed
    near = _EXACT if is_exact and not _is_rounded(model) else _ROUGH

    def tried(whole: Any, cut: Any) -> str | None:
        rows = batch_size(whole) or 1
        few = [take_rows(batch, slice(0, _ROWS), rows) for batch in (whole, cut)]
        try:
            with _without_dropout(model), _checked(model, session.device):
                (loss, found), (other_loss, others) = compute(few[0]), compute(few[1])
        except Exception as error:  # noqa: BLE001  whatever it wants of the columns
            return f"{type(error).__name__} in a trial"
        if not _are_near(loss, other_loss, near):
            return "the loss differed"
        return None if _are_near(found, others, near) else "gradients or predictions differed"

    return tried


def _are_near(ones: list[torch.Tensor], others: list[torch.Tensor], near: float) -> bool:
    """Whether all values together are the same, up to rounding."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return False
    apart = sum(
        float((one.float() - other.float()).square().sum())
        for one, other in zip(ones, others, strict=True)
    )
    size = sum(float(one.float().square().sum()) for one in ones)
    return apart <= near * near * size + 1e-20


def _some(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters from all over the model, together of a bounded size."""
    taken: list[nn.Parameter] = []
    values = 0
    step = max(1, len(parameters) // 32)
    for parameter in [*parameters[::step], *parameters[:1]]:
        if values + parameter.numel() <= _MOST_VALUES and all(parameter is not p for p in taken):
            taken.append(parameter)
            values += parameter.numel()
    return taken or parameters[-1:]


def _is_rounded(model: nn.Module) -> bool:
    return any(
        parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()
    )


def _checked(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Look at indexes before a device does that is lost by a wrong one: the step is to name it."""
    return nullcontext() if device.type == "cpu" else ranges.Checking(model).watching()


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Let the block compute without chance, and leave modes and generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
