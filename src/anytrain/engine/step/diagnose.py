"""Name the module and the samples that made the first NaN or infinity of a step.

The step is run again, one micro-batch at a time, with every module watched: by hooks, and its
gradients by hooks on tensors. A module's input is replaced by a view of itself, so that what flows
back through this one use of it is seen apart. (PyTorch's own full backward hooks refuse modules
that work in place.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from anytrain.engine.tree import leaves, num_rows, take_rows

Phase = Literal["parameter", "input", "forward", "loss", "backward", "not reproduced"]
Run = Callable[[Any], Any]
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What made the first NaN or infinity of a step; `str` tells it in a sentence or two."""

    phase: Phase
    micro_batch: int | None = None
    module: str | None = None
    """The module's path; "" for the model itself, None where no module made it."""
    kind: str = ""
    tensor: str = ""
    num_nan: int = 0
    num_inf: int = 0
    num_values: int = 0
    rows: tuple[int, ...] = ()
    """The rows of the micro-batch; empty where they could not be told apart."""
    samples: tuple[Any, ...] = ()
    """The ids of those rows, where ids were given."""

    @property
    def found(self) -> bool:
        """Whether the replay showed it."""
        return self.phase != "not reproduced"

    def __str__(self) -> str:
        if not self.found:
            return (
                "Not reproduced: run again, every micro-batch of the step gave a finite loss and "
                "finite gradients. The cause is not in them alone (their sum overflowed, another "
                "rank's part was bad, or the device computes differently each time)."
            )
        return f"{self._what()}{self._where()}."

    def _what(self) -> str:
        counts = f"{self._counts()} among {self.num_values:,} values"
        if self.phase == "parameter":
            return f"{self.tensor} of {self._named()} was bad before the step: {counts}"
        if self.phase == "input":
            return f"The data is bad: {self.tensor} holds {counts}"
        if self.phase == "loss":
            return f"The model's outputs are finite and the loss is not: {counts}"
        if self.phase == "backward" and self.module is None:
            return f"The loss is finite and its gradient is not: {counts}"
        if self.phase == "backward":
            return f"In backward, {self._named()} made {counts} in {self.tensor}"
        return f"{self._named()} made {counts} in {self.tensor}, from finite inputs"

    def _named(self) -> str:
        return f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"

    def _counts(self) -> str:
        parts = [(self.num_nan, "NaN"), (self.num_inf, "infinite")]
        return " and ".join(f"{count:,} {name}" for count, name in parts if count)

    def _where(self) -> str:
        if self.micro_batch is None:
            return ""
        where = f", in micro-batch {self.micro_batch}"
        if self.samples:
            return f"{where}; {_listed('sample', self.samples)}"
        return f"{where}; {_listed('row', self.rows)}" if self.rows else where


def find(
    model: nn.Module,
    run: Run,
    micro_batches: Sequence[Any],
    ids: Sequence[Sequence[Any]] | None = None,
) -> Finding:
    """Run a bad step again and tell what made its first NaN or infinity.

    `run` does forward and backward of one micro-batch and returns the loss (it may return None).
    `ids` holds each micro-batch's sample ids, row by row. The model is left as it was, but for
    its gradients, which become None; whoever calls restores generators. The model is the one
    whose modules users know: gradients need not be shared among ranks.
    """
    with _left_as_it_was(model):
        finding = _bad_parameter(model)
        if finding is not None:
            return finding
        for index, batch in enumerate(micro_batches):
            finding = _try(model, run, batch)
            if finding is not None:
                known = () if ids is None else ids[index]
                samples = tuple(known[row] for row in finding.rows if row < len(known))
                return replace(finding, micro_batch=index, samples=samples)
    return Finding(phase="not reproduced")


def _try(model: nn.Module, run: Run, batch: Any) -> Finding | None:
    """Return what is bad about one micro-batch; None where all is finite."""
    _clear_gradients(model)
    with ModuleWatch(model) as watch:
        loss = run(batch)
    bad_loss = worst(loss)
    if loss is None and watch.model_output is not None and watch.model_output.level == STRONG:
        bad_loss = watch.model_output
    if bad_loss is None and _bad_gradient(model) is None:
        return None
    finding, bad = _explain(model, watch, batch, bad_loss)
    return replace(finding, rows=_rows(model, run, batch, bad))


def _explain(
    model: nn.Module, watch: ModuleWatch, batch: Any, bad_loss: Bad | None
) -> tuple[Finding, Bad]:
    named = _bad_input(batch)
    if named is not None:
        return _finding("input", named[1], tensor=named[0]), named[1]
    onset = watch.forward_onset()
    if onset is not None:
        whole_model = onset.call is not None and onset.call.path == "" and onset.bad.length is None
        phase: Phase = "loss" if whole_model else "forward"
        return _finding(phase, onset.bad, onset), onset.bad
    if bad_loss is not None:
        return _finding("loss", bad_loss), bad_loss
    onset = watch.backward_onset()
    if onset is not None:
        return _finding("backward", onset.bad, onset), onset.bad
    name, bad = _known(_bad_gradient(model))
    return _finding("backward", bad, tensor=f"the gradient of {name}"), replace(bad, length=None)


def _finding(phase: Phase, bad: Bad, onset: Onset | None = None, *, tensor: str = "") -> Finding:
    call = onset.call if onset is not None else None
    return Finding(
        phase=phase,
        module=None if call is None else call.path,
        kind="" if call is None else call.kind,
        tensor=tensor if onset is None else onset.tensor,
        num_nan=bad.num_nan,
        num_inf=bad.num_inf,
        num_values=bad.num_values,
    )


def _bad_parameter(model: nn.Module) -> Finding | None:
    """Return the first parameter or buffer that was bad already; buffers may mask by infinity."""
    for path, module in model.named_modules():
        held = [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        for name, tensor in held:
            bad = examine(tensor)
            if bad is not None and (bad.num_nan or tensor.requires_grad):
                found = _finding("parameter", bad, tensor=name)
                return replace(found, module=path, kind=type(module).__name__)
    return None


def _bad_input(batch: Any) -> tuple[str, Bad] | None:
    """Return the first tensor of the data that holds a bad value; a mask may hold -inf."""
    for name, tensor in _named_tensors(batch, "the batch"):
        bad = examine(tensor)
        if bad is not None and (bad.level == STRONG or "mask" not in name):
            return name, bad
    return None


def _named_tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{key!r}" if name == "the batch" else f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _named_tensors(value, f"{name}[{index}]")


def _bad_gradient(model: nn.Module) -> tuple[str, Bad] | None:
    for name, parameter in model.named_parameters():
        bad = None if parameter.grad is None else examine(parameter.grad)
        if bad is not None:
            return name, bad
    return None


def _known(found: tuple[str, Bad] | None) -> tuple[str, Bad]:
    assert found is not None, "a bad step has a bad loss or a bad gradient"
    return found


def _rows(model: nn.Module, run: Run, batch: Any, bad: Bad) -> tuple[int, ...]:
    """Return the rows of the batch that are to blame.

    The tensor tells, where its rows are the batch's. Where it can't, or blames all of them
    (a norm over the batch spreads one bad row to the others), each row is run alone.
    """
    rows = num_rows(batch)
    if rows is None:
        return ()
    told = bad.rows if bad.length == rows else ()
    if told and (len(told) < rows or rows == 1):
        return told
    alone: list[int] = []
    # A batch norm refuses a single row, for one.
    with contextlib.suppress(Exception):
        alone = [
            row
            for row in range(rows)
            if _is_bad(model, run, take_rows(batch, slice(row, row + 1), rows))
        ]
    return tuple(alone) or told


def _is_bad(model: nn.Module, run: Run, batch: Any) -> bool:
    _clear_gradients(model)
    return worst(run(batch)) is not None or _bad_gradient(model) is not None


def _clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled (compiled code has no hooks), and put its buffers and modes back."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)
        _clear_gradients(model)


def _listed(word: str, values: tuple[Any, ...]) -> str:
    shown = ", ".join(str(value) for value in values[:_MOST_NAMED])
    more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
    return f"{word}{'s' if len(values) > 1 else ''} {shown}{more}"


FINE, WEAK, STRONG = 0, 1, 2
"""How bad values are: -inf alone often masks on purpose, NaN and +inf hardly ever do."""


@dataclass(frozen=True)
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


@dataclass(eq=False)
class Call:
    """One use of a module."""

    path: str
    kind: str
    parent: Call | None
    taint: int = FINE
    """How bad what it was given, or what was made inside it, was."""
    fed: int = FINE
    gradient_came_bad: bool = False


@dataclass
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
        elif is_dataclass(leaf) and not isinstance(leaf, type):
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
                bad = replace(bad, length=None, rows=())  # its rows are no samples
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
