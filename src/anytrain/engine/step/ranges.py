"""Find the token id, label or position that lies outside the table it is looked up in.

A CPU's own error names neither the tensor nor the sample, and a GPU's comes later than the step
and ends all work on the device. So the step's forward is run again on the host, with the batch's
whole numbers as they are, and of everything else the shapes alone: that takes no weight and no
device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import anytrain
from anytrain.engine.tree import map_tensors

_LARGE = 2**20
"""Values of which nobody makes a table of positions or a mask that matters here."""
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(anytrain.__file__).parent))


@dataclass(frozen=True, slots=True)
class BadIndex:
    """A value outside its table, and where it was looked up."""

    op: str
    """torch's name of the operation: "embedding", "nll_loss_forward"."""
    index: torch.Tensor
    """All that was looked up there, on the host."""
    low: int
    high: int
    """The table's range; `high` is the first that is too large."""
    ignored: int | None
    module: str
    """The module's path; "" for the model itself."""
    kind: str
    place: str
    """The innermost line that is neither torch's nor this library's; "" where there is none."""

    def __post_init__(self) -> None:
        assert self.is_outside(self.index).any()

    def is_outside(self, values: torch.Tensor) -> torch.Tensor:
        """Tell of each value whether it is none of the table's."""
        bad = (values < self.low) | (values >= self.high)
        return bad if self.ignored is None else bad & (values != self.ignored)

    @property
    def value(self) -> int:
        """The first value that is outside."""
        return int(self.index[self.is_outside(self.index)].flatten()[0])

    @property
    def is_loss(self) -> bool:
        """Whether it was taken for a class by a loss."""
        return self.op.startswith("nll_loss")


class OutsideTable(Exception):
    """A value outside its table was met; what would have read it has not run."""

    def __init__(self, outside: BadIndex) -> None:
        super().__init__(outside)
        self.outside = outside


class Checking(TorchDispatchMode):
    """Look at each index before it is used; each look waits for the device.

    INVARIANT: what runs inside computes what it would compute without.
    """

    only_looks = True
    """Kernels are chosen as they are without it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[tuple[str, str]] = [("", type(model).__name__)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, if all that it looks up is there."""
        self._look(func, args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.removeprefix("aten::")
        reads = _READS.get(name.removesuffix("_"))
        for index, low, high, ignored in () if reads is None else reads(args):
            if type(index) is not torch.Tensor or index.is_floating_point() or not index.numel():
                continue  # nobody knows its values here
            bad = (index < low) | (index >= high)
            bad = bad if ignored is None else bad & (index != ignored)
            if bool(bad.any()):
                module, kind = self._inside[-1]
                host = index.detach().cpu()
                raise OutsideTable(
                    BadIndex(name, host, low, high, ignored, module, kind, user_place(_frames()))
                )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check what the block runs, and know the module that it is in."""
        with ExitStack() as stack:
            enter = module_hooks.register_module_forward_pre_hook(self._enter)
            leave = module_hooks.register_module_forward_hook(self._leave, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
            stack.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append((self._names.get(id(module), ""), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


class _OnHost(Checking):
    """Compute whole numbers, and of all that depends on a weight the shape alone."""

    def __init__(self, model: nn.Module) -> None:
        from torch._subclasses import fake_tensor  # takes a while, and few runs need it

        super().__init__(model)
        self._shapes = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._kind = fake_tensor.FakeTensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on what is known of its inputs."""
        self._look(func, args)
        kwargs = kwargs or {}
        if any(isinstance(leaf, self._kind) for leaf in tree_flatten((args, kwargs))[0]):
            args, kwargs = tree_map(self.shape_of, (args, kwargs))
            return func(*args, **kwargs)
        return tree_map(self._lightened, func(*args, **kwargs))

    def shape_of(self, leaf: Any) -> Any:
        """Return what stands for a tensor whose values do not matter."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, self._kind):
            return leaf
        with self._shapes:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")

    def _lightened(self, leaf: Any) -> Any:
        is_large = isinstance(leaf, torch.Tensor) and leaf.numel() > _LARGE
        return self.shape_of(leaf) if is_large and leaf.is_floating_point() else leaf


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the model's buffers of whole numbers: it may read positions from them."""
    return {
        name: buffer.detach().cpu()
        for name, buffer in model.named_buffers()
        if not buffer.is_floating_point() and buffer.numel() <= _LARGE and not buffer.is_complex()
    }


def find(
    model: nn.Module,
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
    known: Mapping[str, torch.Tensor],
) -> BadIndex | None:
    """Return the first value of a batch on the host that is outside its table; None if none is.

    `run` computes the loss, from the model and the batch; `known` is what `tables` gave. Where the
    computation depends on a value that nobody knows here, the rest of it is not looked at.
    """
    watch = _OnHost(model)
    own = [*model.named_parameters(), *model.named_buffers()]
    held = {name: known.get(name, watch.shape_of(tensor.detach())) for name, tensor in own}
    light = map_tensors(lambda t: watch.shape_of(t) if t.is_floating_point() else t, batch)
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        stateless._reparametrize_module(model, held),
        _quiet(logging.getLogger("torch._subclasses.fake_tensor")),
        watch.watching(),
    ):
        try:
            run(model, light)
        except OutsideTable as found:
            return found.outside
        except Exception:  # noqa: BLE001  it depends on values, or is what failed in the step
            return None
    return None


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Keep torch from telling, with a traceback, what of the shapes alone it cannot compute."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def user_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first of these lines that is the user's, or a library's above torch."""
    for frame, line in frames:
        if not frame.f_code.co_filename.startswith((*_NOT_USERS, "<")):
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return ""


def _frames() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


# -- what each operation looks up: the indices, the range, and a value that it passes over --------

Lookup = tuple[torch.Tensor, int, int, int | None]


def _row(args: tuple[Any, ...]) -> Iterator[Lookup]:
    yield args[1], 0, args[0].shape[0], None


def _along(args: tuple[Any, ...]) -> Iterator[Lookup]:
    table, dim, index = args[:3]
    if table.ndim:
        yield index, 0, table.shape[dim], None


def _class(args: tuple[Any, ...]) -> Iterator[Lookup]:
    scores = args[0]
    yield args[1], 0, scores.shape[1 if scores.ndim > 1 else 0], args[4]


def _places(args: tuple[Any, ...]) -> Iterator[Lookup]:
    dim = 0
    for index in args[1]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.ndim
        else:
            size = args[0].shape[dim]
            yield index, -size, size, None
            dim += 1


_READS: dict[str, Callable[[tuple[Any, ...]], Iterator[Lookup]]] = {
    "embedding": _row,
    "_embedding_bag": _row,
    "_embedding_bag_forward_only": _row,
    "nll_loss_forward": _class,
    "nll_loss2d_forward": _class,
    "gather": _along,
    "index_select": _along,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "index": _places,
    "index_put": _places,
}
