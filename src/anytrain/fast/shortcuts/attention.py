"""The attention of transformers' models: masks that a recording need not build, and kernels.

transformers looks at the values of what a mask is made from, and leaves out a mask that would hide
nothing: only then does attention take its fastest kernel. A recording has no values to look at, so
it makes the whole mask. Before 5.22 it does so even where the batch brings no mask, and then one
that no fused kernel takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import torch

from anytrain.core import patches
from anytrain.fast.kernels import attention as kernels

_MODULE = "transformers.masking_utils"
_MODELS = "transformers.modeling_utils"


class Masks:
    """What transformers is told of a step's attention masks while the step is recorded.

    INVARIANT: it is told only what does not depend on the values of the batch.
    """

    def __init__(self) -> None:
        self._packs = False
        """Whether a step that ran op by op had several texts in one row."""

    @contextmanager
    def observed(self, *, as_recorded: bool = False) -> Iterator[None]:
        """Note in the block whether rows hold several texts.

        `as_recorded` has masks built as a recording builds them, so that the block takes the
        kernels, and draws the numbers, that its recording will.
        """
        looks_inside = False

        def seen(own: Callable[..., Any], *given: Any, **more: Any) -> Any:
            nonlocal looks_inside
            looks_inside = True
            try:
                found = own(*given, **more)
            finally:
                looks_inside = False
            self._packs = self._packs or found is not None
            return found

        def is_tracing(own: Callable[..., Any], *given: Any, **more: Any) -> Any:
            is_mask = as_recorded and not looks_inside and given and given[0] is not None
            return True if is_mask else own(*given, **more)

        with _changed("find_packed_sequence_indices", seen), _changed("is_tracing", is_tracing):
            yield

    @contextmanager
    def recorded(self, inputs: list[torch.Tensor]) -> Iterator[None]:
        """Let the block, which is recorded on these inputs, build no mask that hides nothing."""
        places = {tensor.untyped_storage().data_ptr() for tensor in inputs}

        def is_tracing(own: Callable[..., Any], *given: Any, **more: Any) -> Any:
            # Where there is no mask there are no values that a recording could not look at.
            return own(*given, **more) if not given or given[0] is not None else False

        def find_packed(own: Callable[..., Any], *given: Any, **more: Any) -> Any:
            positions = given[0] if given else next(iter(more.values()))
            is_own = positions.untyped_storage().data_ptr() not in places
            if is_own and _is_one_row(positions) and not self._packs:
                return None
            return own(*given, **more)

        with (
            _changed("is_tracing", is_tracing),
            _changed("find_packed_sequence_indices", find_packed),
        ):
            yield


def attend_quickly(device: torch.device) -> AbstractContextManager[None]:
    """Let transformers' models attend over short texts by a faster kernel in the block.

    Only what they call "sdpa" is changed: a function of torch's own is compared with by its users.
    """
    return patches.shared("short attention", lambda: _attend_quickly(device))


def _attend_quickly(device: torch.device) -> Callable[[], None] | None:
    functions: Any = getattr(sys.modules.get(_MODELS), "ALL_ATTENTION_FUNCTIONS", None)
    own = functions.get("sdpa") if hasattr(functions, "register") else None
    if own is None or not kernels.asks_cudnn_first(device):
        return None
    functions.register("sdpa", _quick(own, device))
    return lambda: functions.register("sdpa", own)


@lru_cache(maxsize=8)
def _quick(own: Callable[..., Any], device: torch.device) -> Any:
    return kernels.quick(own, device)


def _is_one_row(positions: torch.Tensor) -> bool:
    """Whether all rows are one: positions that the model counted up, not the batch's own."""
    return positions.dim() == 2 and len(positions) > 1 and positions.stride(0) == 0


@contextmanager
def _changed(name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Let a function of transformers go through another in the block, where it is loaded."""
    module = sys.modules.get(_MODULE)
    own = getattr(module, name, None)
    if own is None:
        yield
        return

    def called(*given: Any, **more: Any) -> Any:
        return instead(own, *given, **more)

    with patches.replaced("recorded masks", module, **{name: called}):
        yield
