"""One process has the whole model and the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anytrain.core.facts import MemoryForecast, ModelFacts
from anytrain.machine.parallel.world import World
from anytrain.machine.strategies.base import Part


def norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of gradients that are all here, as torch.nn.utils computes it."""
    are_plain = bool(gradients) and all(  # dense float32 values in host memory
        grad.is_cpu
        and grad.dtype is torch.float32
        and grad.layout is torch.strided
        and not grad.requires_grad
        for grad in gradients
    )
    if norm_type == 2.0 and are_plain:  # the same few calls, without the sorting
        whole: torch.Tensor = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(list(gradients)))
        )
        return whole
    return torch.nn.utils.get_total_norm(gradients, norm_type)


def whole_parts(held: Sequence[nn.Module | Optimizer], writer: int = 0) -> Iterator[Part]:
    """Yield every tensor of models and optimizers as one that is here as a whole."""
    for each in held:
        named = _of_model(each) if isinstance(each, nn.Module) else _of_optimizer(each)
        for name, tensor in named:
            yield Part(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape), writer)


def _of_model(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters and what of its buffers is saved, tied ones once."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)


def _of_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what an optimizer keeps of each parameter, numbered as in its state dict."""
    state = getattr(optimizer, "state", {})  # one that only looks like torch's may have none
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        kept = state.get(parameter, {})
        for name, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, torch.Tensor):
                yield f"state.{number}.{name}", value


def load_whole(held: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of which this rank holds everything."""
    if isinstance(held, nn.Module):
        held.load_state_dict(state, strict=False)
    else:
        held.load_state_dict(dict(state))


class Solo:
    """Train alone: nothing is shared, and nobody is waited for."""

    name = "solo"

    def __init__(self, world: World, device: torch.device) -> None:
        pass

    def place(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        return model

    def original(self, model: nn.Module) -> nn.Module:
        return model

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to send gradients to."""
        return nullcontext()

    def share_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to average with."""
        return nullcontext()

    def end_backward(self, model: nn.Module) -> str | None:
        """Return None: one process has its gradients."""
        return None

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the mean of one is itself."""

    def norm(self, gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        return norm(gradients, norm_type)

    def end_update(self, model: nn.Module) -> None:
        """Do nothing: the update is all there is."""

    def parts(self, *held: nn.Module | Optimizer) -> Iterator[Part]:
        return whole_parts(held)

    def load(self, held: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        load_whole(held, state)

    def forecast(self, facts: ModelFacts, options: Mapping[str, Any]) -> MemoryForecast:
        return MemoryForecast(facts.weight_bytes, facts.gradient_bytes, facts.optimizer_bytes)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Do nothing: nobody else runs out."""
        return nullcontext()
