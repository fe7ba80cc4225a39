"""Watch every module of a model through one forward and backward, for the first bad value.

Modules are seen by hooks. Gradients are seen by hooks on tensors: a module's input is replaced by
a view of itself, so that what flows back through this one use of it is seen apart. (PyTorch's
own full backward hooks refuse modules that work in place.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from anytrain.engine.tree import leaves

FINE, WEAK, STRONG = 0, 1, 2
"""How bad values are: -inf alone often masks on purpose, NaN and +inf hardly ever do."""


@dataclasses.dataclass(frozen=True)
class Bad:
    """A tensor with values that are not finite."""

    num_nan: int
    num_inf: int
    num_values: int
    level: int
    length: int | None
    """The size of the first dimension; None for a scalar."""
    rows: tuple[int, ...]
    """Where along the first dimension they are."""


@dataclasses.dataclass(eq=False)
class Call:
    """One use of a module."""

    path: str
    kind: str
    parent: Call | None
    taint: int = FINE
    """How bad what it was given, or what was made inside it, was."""
    fed: int = FINE
    gradient_came_bad: bool = False


@dataclasses.dataclass
class Onset:
    """Where bad values came from good ones."""

    call: Call | None
    tensor: str
    bad: Bad
    cancelled: bool = False


def examine(tensor: torch.Tensor) -> Bad | None:
    """Return what is wrong with the values; None where all are finite."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if not (values.is_floating_point() or values.is_complex()) or values.device.type == "meta":
        return None
    wrong = ~torch.isfinite(values)
    if not bool(wrong.any()):
        return None
    nan = torch.isnan(values)
    num_nan, num_wrong = int(nan.sum()), int(wrong.sum())
    weak = num_nan == 0 and not values.is_complex() and not bool((values == torch.inf).any())
    rows: tuple[int, ...] = ()
    if values.ndim > 0 and not tensor.is_sparse:
        flags = wrong.reshape(len(wrong), -1).any(1)
        rows = tuple(flags.nonzero().flatten().tolist())
    return Bad(
        num_nan=num_nan,
        num_inf=num_wrong - num_nan,
        num_values=values.numel(),
        level=WEAK if weak else STRONG,
        length=int(tensor.shape[0]) if tensor.ndim else None,
        rows=rows,
    )


def worst(value: Any) -> Bad | None:
    """Return the worst of the tensors that a module takes or gives; the first of equals."""
    found = [bad for bad in map(examine, tensors(value)) if bad is not None]
    return max(found, key=lambda bad: bad.level, default=None)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value, those of a data class too."""
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors(list(vars(leaf).values()))


class ModuleWatch:
    """A context in which a model's modules are seen; it leaves no hook behind."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[Call] = []
        self._handles: list[Any] = []
        self._onsets: list[Onset] = []
        self._first_gradient: tuple[Call, str, Bad, bool] | None = None
        self.model_output: Bad | None = None

    def __enter__(self) -> ModuleWatch:
        for module in self._paths:
            if not isinstance(module, torch.jit.ScriptModule):  # its parts run outside Python
                before = module.register_forward_pre_hook(self._before, with_kwargs=True)
                # Also after an error: a checkpoint ends its second forward by one.
                after = module.register_forward_hook(self._after, always_call=True)
                self._handles += [before, after]
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._parameter_hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack = []

    # -- forward ------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        parent = self._stack[-1] if self._stack else self._owner(module)
        call = Call(self._paths[module], type(module).__name__, parent)
        bad = worst([args, kwargs])
        if bad is not None:
            call.fed = call.taint = bad.level
            if parent is not None and bad.level > parent.taint:
                self._note(Onset(parent, f"what it handed to {call.path}", bad))
                self._taint(parent, bad.level)
        self._stack.append(call)
        seen = {name: self._seen(value, call) for name, value in kwargs.items()}
        return tuple(self._seen(value, call) for value in args), seen

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._paths[module]
        while self._stack and self._stack[-1].path != path:
            self._stack.pop()
        if not self._stack:
            return
        call = self._stack.pop()
        bad = worst(output)
        if bad is not None:
            if bad.level > call.taint:
                self._note(Onset(call, "its output", bad))
            self._taint(call.parent, bad.level)
        elif call.fed == WEAK and output is not None:
            self._cancel_weak()
        if module is self._model:
            self.model_output = bad
        for tensor in tensors(output):
            self._hook(tensor, call, is_output=True)

    def _note(self, onset: Onset) -> None:
        self._onsets.append(onset)

    def _cancel_weak(self) -> None:
        """Believe that -inf was meant: a module was given it and made finite values of it."""
        for onset in self._onsets:
            onset.cancelled = onset.cancelled or onset.bad.level == WEAK

    @staticmethod
    def _taint(call: Call | None, level: int) -> None:
        while call is not None:
            call.taint = max(call.taint, level)
            call = call.parent

    def _owner(self, module: nn.Module) -> Call | None:
        """Return who seems to call a module outside any forward: a checkpoint's second one."""
        path = self._paths[module]
        if not path:
            return None
        above = path.rpartition(".")[0]
        return Call(above, type(self._model.get_submodule(above)).__name__, None)

    # -- backward -----------------------------------------------------------------------------

    def _seen(self, value: Any, call: Call) -> Any:
        """Return the argument with its tensors as views whose gradients are watched."""
        if type(value) is tuple:
            return tuple(self._seen(each, call) for each in value)
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value
        if not value.requires_grad or not torch.is_grad_enabled():
            return value
        view = value.view_as(value)
        self._hook(view, call, is_output=False)
        return view

    def _hook(self, tensor: torch.Tensor, call: Call, *, is_output: bool) -> None:
        if not tensor.requires_grad:
            return

        def look(gradient: torch.Tensor) -> None:
            bad = examine(gradient)
            if bad is None:
                return
            if is_output:
                call.gradient_came_bad = True
            if self._first_gradient is None:
                self._first_gradient = (call, "the gradient of its input", bad, is_output)

        self._handles.append(tensor.register_hook(look))

    def _parameter_hook(self, name: str) -> Any:
        def look(gradient: torch.Tensor) -> None:
            bad = None if self._first_gradient is not None else examine(gradient)
            if bad is not None:
                bad = dataclasses.replace(bad, length=None, rows=())  # its rows are no samples
                path, _, short = name.rpartition(".")
                call = Call(path, type(self._model.get_submodule(path)).__name__, None)
                self._first_gradient = (call, f"the gradient of its {short}", bad, False)

        return look

    # -- what came out ------------------------------------------------------------------------

    def forward_onset(self) -> Onset | None:
        """Return where the forward made its first bad values."""
        return next((onset for onset in self._onsets if not onset.cancelled), None)

    def backward_onset(self) -> Onset | None:
        """Return whose incoming gradient was finite and outgoing was not.

        A call of None means that the gradient was bad before it reached the model.
        """
        if self._first_gradient is None:
            return None
        call, tensor, bad, came_bad = self._first_gradient
        if not came_bad:
            return Onset(call, tensor, bad)
        # It came bad into this call: made by whoever called it, between its modules.
        above = call.parent
        while above is not None and above.gradient_came_bad:
            call, above = above, above.parent
        return Onset(above, f"the gradient that it handed to {call.path}", bad)
