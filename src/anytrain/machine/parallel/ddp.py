"""Average gradients over the ranks with torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from anytrain.core.errors import BadInput

_HOOK_OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
_HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def replicate(
    model: nn.Module,
    device: torch.device,
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the model with its gradients averaged in backward.

    A model with nothing to train is returned as it is: there is nothing to average.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    own = {k: v for k, v in options.items() if k not in _HOOK_OPTIONS and v is not None}
    # A CPU module takes no device list, gloo carries it from where it is; nor does an XLA one.
    devices = None if device.type in ("cpu", "xla") else [device.index]
    if device.type == "xla":  # gradients that are copied into buckets would be a second graph
        own.setdefault("gradient_as_bucket_view", True)
    replica = DistributedDataParallel(model, device_ids=devices, process_group=group, **own)
    compress(replica, options)
    return replica


def original(model: nn.Module) -> nn.Module:
    """Return what was given to `replicate`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Leave gradients local inside the block."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    block: AbstractContextManager[None] = model.no_sync()
    return block


@contextmanager
def sync_next_backward(model: nn.Module) -> Iterator[None]:
    """Average the gradients of a backward inside the block, though its forward did not plan to."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    replica: Any = model
    before = replica.require_backward_grad_sync
    replica.require_backward_grad_sync = True
    replica.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        replica.require_backward_grad_sync = before


def join(models: list[nn.Module]) -> AbstractContextManager[None]:
    """Let ranks run out of batches at different times inside the block."""
    replicas: list[Joinable] = [m for m in models if isinstance(m, DistributedDataParallel)]
    if not replicas:
        return nullcontext()
    block: AbstractContextManager[None] = Join(replicas)
    return block


def compress(replica: DistributedDataParallel, options: Mapping[str, Any]) -> None:
    """Put the wished compression between backward and the transport."""
    hook = _pick("comm_hook", options, _HOOKS)
    wrapper = _pick("comm_wrapper", options, _WRAPPERS)
    if hook is None:
        return
    state = None
    if _word(options.get("comm_hook")).endswith("power_sgd"):
        state = powerSGD_hook.PowerSGDState(None, **(options.get("comm_state_option") or {}))
    replica.register_comm_hook(state, wrapper(hook) if wrapper else hook)


def _pick(
    name: str, options: Mapping[str, Any], known: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any] | None:
    word = _word(options.get(name))
    if word == "no":
        return None
    if word not in known:
        raise BadInput(
            f"Unknown {name} {word!r}.",
            why=f"known values are 'no', {', '.join(map(repr, known))}.",
            fix=f'pass {name}="no" or one of them.',
        )
    return known[word]


def _word(value: object) -> str:
    """Return an option's word; enums of HF's kind hold it in `value`."""
    return "no" if value is None else str(getattr(value, "value", value)).lower()
