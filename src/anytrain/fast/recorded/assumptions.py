"""What a recording takes for granted, and what a step leaves behind on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from anytrain.fast.recorded.host_draws import HostDraws

_PLAIN = (bool, int, float, str)
_FIXED = ("_parameters", "_buffers", "_modules")
_values = methodcaller("values")


class Assumptions:
    """All that a recording has taken for granted, cheap enough to look at every step.

    Objects are kept and compared by identity, so that none can take another's place unseen.
    """

    def __init__(
        self, model: nn.Module, optimizers: tuple[Any, ...], *, owns_gradients: bool = True
    ) -> None:
        self._parameters = list(model.parameters())
        self._holders = self._parameters if owns_gradients else []
        """Those whose gradients must be where they were."""
        self._tensors = [*self._parameters, *model.buffers()]
        self._kept: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        """The modules' hooks and the like: most are empty, and need only stay so."""
        for module in model.modules():
            own = vars(module)
            inner = [value for value in own.values() if isinstance(value, dict)]
            self._kept += [own, *filter(None, inner)]
            self._empty += [value for value in inner if not value]
        self._optimizers = optimizers
        self._lengths = list(map(len, self._kept))
        self._objects = list(self._look())
        self._numbers = self._count()

    def hold(self) -> bool:
        """Whether all is as it was."""
        return (
            not any(self._empty)
            and list(map(len, self._kept)) == self._lengths
            and all(map(is_, self._look(), self._objects))
            and self._count() == self._numbers
        )

    def _look(self) -> Iterator[Any]:
        return chain.from_iterable(map(_values, self._kept))

    def _count(self) -> tuple[Any, ...]:
        groups = [group for o in self._optimizers for group in o.param_groups]
        return (
            [tensor.data_ptr() for tensor in self._tensors],
            [(p.requires_grad, p._backward_hooks, _after(p)) for p in self._parameters],
            [None if (g := p.grad) is None else g.data_ptr() for p in self._holders],
            [(id(o.state), len(o.state), *_hook_counts(o)) for o in self._optimizers],
            [
                value.data_ptr()
                for o in self._optimizers
                for state in o.state.values()
                for value in state.values()
                if type(value) is torch.Tensor
            ],
            [
                value.data_ptr() if isinstance(value, torch.Tensor) else value
                for group in groups
                for name, value in group.items()
                if name != "params"
            ],
            [len(group["params"]) for group in groups],
        )


def _after(parameter: torch.Tensor) -> Any:
    """Return the hooks that are called once a parameter has its gradient."""
    return parameter._post_accumulate_grad_hooks


def _hook_counts(optimizer: Any) -> tuple[int, int]:
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


class HostState:
    """What the host holds of a step's doing: a replay would not touch it."""

    def __init__(self, model: nn.Module, optimizers: tuple[Any, ...]) -> None:
        self._model, self._optimizers = model, optimizers
        self._generators = _generators()
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._held: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (module, held, dict(held))
            for module in model.modules()
            for held in (module._parameters, module._buffers)
        ]
        self._states = [set(optimizer.state) for optimizer in optimizers]
        self._gradients = [(p, p.grad) for p in model.parameters()]

    def missed(self, chances: HostDraws) -> str | None:
        """Name what was left on the host since; None where a replay would miss nothing."""
        drawn = self._drawn(chances)
        if drawn:
            return (
                f"the step draws random numbers on the host (by {' and '.join(drawn)}; LayerDrop "
                "does so, for one), which a recording would repeat"
            )
        kept = self._kept()
        if kept is not None:
            return kept
        if any(len(o.state) > len(s) for o, s in zip(self._optimizers, self._states, strict=True)):
            return "a parameter has got its first gradient only now"
        return None

    def _drawn(self, chances: HostDraws) -> list[str]:
        """Return whose random numbers were drawn that a replay would not draw."""
        before, after = self._generators, _generators()
        same = {
            "Python": before.pythons == after.pythons,
            "numpy": _are_same(before.numpys, after.numpys),
            "torch": chances.explain(before.torchs, after.torchs),
        }
        return [name for name, is_known in same.items() if not is_known]

    def _kept(self) -> str | None:
        """Name what a module holds that it did not hold before."""
        for module, old in self._attributes:
            new = vars(module)
            for name in new.keys() | old.keys():
                if name not in _FIXED and not _is_same(old.get(name), new.get(name)):
                    return (
                        f"{type(module).__name__} keeps something in its attribute {name!r} at "
                        "every step, which a recording would not do"
                    )
        for module, held, before in self._held:
            for name in held.keys() | before.keys():
                if held.get(name) is not before.get(name):
                    return (
                        f"{type(module).__name__} has another tensor as its {name!r} after every "
                        "step, which a recording would not have"
                    )
        return None

    def rewind(self) -> None:
        """Put the host's generators back: what a recording has drawn its replays draw."""
        random.setstate(self._generators.pythons)
        np.random.set_state(self._generators.numpys)
        torch.set_rng_state(self._generators.torchs)

    def restore(self) -> None:
        """Put attributes and states back: what a recording makes is no place for real values."""
        self.rewind()
        for module, old in self._attributes:
            vars(module).clear()
            vars(module).update(old)
        for _, held, before in self._held:
            held.clear()
            held.update(before)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for optimizer, known in zip(self._optimizers, self._states, strict=True):
            for parameter in set(optimizer.state) - known:
                del optimizer.state[parameter]


class _Generators(NamedTuple):
    """The states of the host's generators."""

    pythons: Any
    numpys: Any
    torchs: torch.Tensor


def _generators() -> _Generators:
    return _Generators(random.getstate(), np.random.get_state(), torch.get_rng_state())


def _are_same(before: Any, after: Any) -> bool:
    """Whether two states of numpy's generator are the same."""
    return bool(before[2] == after[2]) and np.array_equal(before[1], after[1])


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    return isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and bool(old == new)
