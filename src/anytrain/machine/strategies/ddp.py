"""Each rank has the whole model and a share of the batch; gradients are averaged in backward.

torch's DistributedDataParallel does the averaging.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anytrain.core.errors import BadInput
from anytrain.core.facts import MemoryForecast, ModelFacts
from anytrain.machine.parallel.world import World
from anytrain.machine.strategies.base import Part
from anytrain.machine.strategies.solo import load_whole, norm, whole_parts

AUTO = "auto"
"""The value of find_unused_parameters that looks whether there are any."""
_NAMED = 4
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


class DDP:
    """Average the gradients of ranks that compute at the same time."""

    name = "ddp"

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device

    def place(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Return the model with its gradients averaged in backward.

        A model with nothing to train is returned as it is: there is nothing to average.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        with self._world.waiting("sharing the model"):
            return _replicate(model, self._device, options, self._world.carrier)

    def original(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        block: AbstractContextManager[None] = model.no_sync()
        return block

    @contextmanager
    def share_next_backward(self, model: nn.Module) -> Iterator[None]:
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

    def end_backward(self, model: nn.Module) -> str | None:
        usage: Usage | None = vars(model).get("_usage")
        return None if usage is None else usage.end_backward(partial(self._world.reduce, op="sum"))

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients that were computed while accumulating, once all are there.

        A parameter that only some ranks have used counts as zero on the others.
        """
        here = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        used = self._world.reduce(here, "max").tolist()
        shared = [p for p, some in zip(parameters, used, strict=True) if some]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in dict.fromkeys(p.dtype for p in shared):
            grads = [p.grad for p in shared if p.dtype == dtype and p.grad is not None]
            whole = self._world.reduce(torch.cat([grad.reshape(-1) for grad in grads]), "mean")
            for grad, part in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def norm(self, gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of these gradients together: each rank has all of them."""
        return norm(gradients, norm_type)

    def end_update(self, model: nn.Module) -> None:
        """Do nothing: every rank has made the same update."""

    def parts(self, *held: nn.Module | Optimizer) -> Iterator[Part]:
        """Yield everything, as a whole: ranks hold the same, and the first one saves it."""
        return whole_parts(held)

    def load(self, held: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """Load the whole state, which every rank holds."""
        load_whole(held, state)

    def forecast(self, facts: ModelFacts, options: Mapping[str, Any]) -> MemoryForecast:
        """Return the whole model and optimizer, and the buckets in which gradients are sent."""
        sends_views = options.get("gradient_as_bucket_view", self._device.type == "xla")
        buckets = 0 if sends_views else facts.gradient_bytes
        return MemoryForecast(
            facts.weight_bytes, facts.gradient_bytes, facts.optimizer_bytes, buckets
        )

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        replicas: list[Joinable] = [m for m in models if isinstance(m, DistributedDataParallel)]
        if not replicas:
            return nullcontext()
        block: AbstractContextManager[None] = Join(replicas)
        return block


def _replicate(
    model: nn.Module,
    device: torch.device,
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> nn.Module:
    own = {k: v for k, v in options.items() if k not in _HOOK_OPTIONS and v is not None}
    # A CPU module takes no device list, gloo carries it from where it is; nor does an XLA one.
    devices = None if device.type in ("cpu", "xla") else [device.index]
    if device.type == "xla":  # gradients that are copied into buckets would be a second graph
        own.setdefault("gradient_as_bucket_view", True)
    looks = own.get("find_unused_parameters") == AUTO
    if looks:
        own["find_unused_parameters"] = False
    replica = DistributedDataParallel(model, device_ids=devices, process_group=group, **own)
    _settle_buckets(replica)
    compress(replica, options)
    if looks:
        vars(replica)["_usage"] = Usage(replica)
    return replica


def _settle_buckets(replica: Any) -> None:
    """Give DDP the buckets that it keeps, by a backward of zeros: the last parameter comes first.

    Left alone it orders them anew after the first step of a process, and of three ranks or more
    the sums round by a gradient's place: a resumed run would differ from one that went on.
    """
    mixed = getattr(replica, "mixed_precision", None) is not None
    sparse = any(getattr(module, "sparse", False) for module in replica.module.modules())
    if replica.find_unused_parameters or replica.static_graph or mixed or sparse:
        return
    held = [parameter for _, parameter in _shared(replica)]
    if any(parameter.device.type == "xla" for parameter in held):
        return  # it would be a graph of its own
    before = [parameter.grad for parameter in held]
    replica.reducer.prepare_for_backward([])
    for parameter in reversed(held):
        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
    for parameter, grad in zip(held, before, strict=True):
        parameter.grad = grad
    replica.reducer._rebuild_buckets()


def _shared(replica: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters whose gradients are averaged, by name."""
    ignored = replica.parameters_to_ignore
    named = replica.module.named_parameters()
    return [(name, p) for name, p in named if p.requires_grad and name not in ignored]


class Usage:
    """Find out which parameters a step leaves unused, and let ranks share gradients all the same.

    A rank that has not used a parameter gives zeros for it; what no rank has used has no
    gradient. Every rank learns the same of each step, so all stop looking after the same one: if
    the first steps have used every parameter on every rank.
    """

    def __init__(self, replica: Any, num_steps: int = 3) -> None:
        self._replica, self._num_steps, self._done = replica, num_steps, 0
        self._shared = _shared(replica)
        self._used: set[int] = set()
        """Parameters that the step has used here."""
        self._given: set[int] = set()
        """Those whose gradients this rank has given in the backward that shares them."""
        self._unused: dict[str, None] = {}
        """Names of what a step has left unused on some rank."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for _, parameter in self._shared
        ]

    def end_backward(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        """Complete a step's gradients, and say what is known by now; None where that is no news.

        `reduce` gives the sum over the ranks.
        """
        if not self._handles:
            self._check()
            return None
        missing = [p for _, p in self._shared if id(p) not in self._given]
        told = [[float(id(p) in ids) for _, p in self._shared] for ids in (self._used, self._given)]
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
        self._learn(reduce(torch.tensor(told, device=self._shared[0][1].device)).tolist())
        self._done += 1
        if self._unused:
            named = _listed(list(self._unused))
            return f"steps leave parameters unused, which are looked for at each: {named}"
        if self._done < self._num_steps:
            return None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return f"the first {self._done} steps used every parameter: unused ones are not looked for"

    def _learn(self, told: list[list[float]]) -> None:
        """Take in how many ranks have used each parameter in this step, and in its last backward.

        One that is not in the last is missed too, though an earlier micro-batch has used it.
        """
        for (name, parameter), used, given in zip(self._shared, *told, strict=True):
            if used == 0:
                parameter.grad = None
            if given < dist.get_world_size():
                self._unused[name] = None
        self._used.clear()
        self._given.clear()

    def _note(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))
        if self._replica.require_backward_grad_sync:
            self._given.add(id(parameter))

    def _check(self) -> None:
        """Refuse a step that has left a parameter unused though no earlier one did."""
        try:
            self._replica.reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            places = [int(place) for place in found[1].split()] if found else []
            names = _listed([self._shared[place][0] for place in places])
            raise BadInput(
                f"The step has left parameters of the model unused: {names}.",
                why="the run's first steps used all of them on every rank, so the ranks share "
                "gradients without a search for unused ones, and wait for these.",
                fix="pass ddp_find_unused_parameters=True, and resume_from_checkpoint=True to go "
                "on from the last checkpoint.",
            ) from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


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
            why=f"the known values are 'no', {', '.join(map(repr, known))}.",
            fix=f'pass {name}="no" or one of them.',
        )
    return known[word]


def _word(value: object) -> str:
    """Return an option's word; enums of HF's kind hold it in `value`."""
    return "no" if value is None else str(getattr(value, "value", value)).lower()
