"""What kernels of mps ask of shapes and dtypes before they work.

Each condition is one that a kernel of torch states itself (a check at its beginning); the file of
torch's sources is named beside it, and what is checked is told in our words. Some hold only below
a version of macOS, which a preflight cannot know: so these things may fail, and are not certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from anytrain.insight.preflight.traced import Op, TensorFacts

_MOST_ELEMENTS = 2**31 - 1
_MOST_DIMENSIONS = 16
_LARGEST_CONVOLVED = 2**16
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")


class Condition(NamedTuple):
    """A reason for which a kernel that exists refuses to work."""

    stems: frozenset[str]
    """The operations it is about, without overload; empty for all."""
    fails: Callable[[Op], bool]
    what: str
    """The end of a sentence that begins with the operation's name."""
    why: str
    fix: str


def failing(op: Op) -> Iterator[Condition]:
    """Yield the conditions that an operation does not meet."""
    stem = op.name.partition(".")[0]
    for condition in CONDITIONS:
        if (not condition.stems or stem in condition.stems) and condition.fails(op):
            yield condition


def _plane(facts: TensorFacts) -> tuple[int, int]:
    return (facts.shape[-2], facts.shape[-1]) if len(facts.shape) > 1 else (1, 1)


def _pooled(op: Op) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes before and after an adaptive pooling, whichever way it is run."""
    if "backward" in op.name:
        return _plane(op.inputs[1]), _plane(op.inputs[0])
    return _plane(op.inputs[0]), _plane(op.outputs[0])


def _grows_and_shrinks(op: Op) -> bool:
    before, after = _pooled(op)
    pairs = list(zip(before, after, strict=True))
    return any(a < b for a, b in pairs) and any(a > b for a, b in pairs)


def _is_uneven(op: Op) -> bool:
    before, after = _pooled(op)
    return any(max(a, b) % max(min(a, b), 1) for a, b in zip(before, after, strict=True))


def _any_tensor(test: Callable[[TensorFacts], bool]) -> Callable[[Op], bool]:
    return lambda op: any(test(t) for t in (*op.inputs, *op.outputs) if t.device == "mps")


_AVERAGE = frozenset({"_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"})
_MAXIMUM = frozenset({"adaptive_max_pool2d", "adaptive_max_pool2d_backward"})
_CONVOLUTION = frozenset({"convolution", "convolution_overrideable", "_convolution"})

CONDITIONS = (
    # AdaptivePooling.mm turns it into a pooling with one window for all, which only exists where
    # the larger size is a multiple of the smaller one.
    Condition(
        _AVERAGE,
        _is_uneven,
        "may fail on mps for these sizes.",
        "The kernel needs sizes of which one is a multiple of the other, in height and in width.",
        "Choose an output size that divides the input's, use avg_pool2d with a fixed window, or "
        "do this layer on the CPU.",
    ),
    # AdaptivePooling.mm: the same window must grow, or shrink, in both directions.
    Condition(
        _AVERAGE | _MAXIMUM,
        _grows_and_shrinks,
        "may fail on mps for these sizes.",
        "The kernel can make height and width both larger or both smaller, not one of each.",
        "Do it in two steps, first one direction and then the other.",
    ),
    # Convolution.mm: before macOS 15.1, no size of the result may be above 2**16.
    Condition(
        _CONVOLUTION,
        lambda op: any(size > _LARGEST_CONVOLVED for t in op.outputs for size in t.shape),
        "may fail on mps: its result is longer than 65,536 in one direction.",
        "The kernel refuses such results before macOS 15.1, and some after it.",
        "Update macOS, or convolve the input in pieces.",
    ),
    # Convolution.mm: floating types alone.
    Condition(
        _CONVOLUTION,
        lambda op: bool(op.inputs) and op.inputs[0].dtype in _INTEGERS,
        "may fail on mps: it convolves integers.",
        "The kernel is for floating types alone; the CPU's takes integers.",
        "Convert the input and the weight to float32.",
    ),
    # OperationUtils.mm and LinearAlgebra.mm: MPSGraph counts with 32 bits.
    Condition(
        frozenset(),
        _any_tensor(lambda t: prod(t.shape) > _MOST_ELEMENTS),
        "may fail on mps: a tensor has more than 2,147,483,647 elements.",
        "Apple's graphs count elements with 32 bits, and torch refuses larger tensors in many ops.",
        "Take a smaller batch or a shorter sequence, or compute in slices.",
    ),
    # c10/metal/common.h: strides are kept in arrays of this length.
    Condition(
        frozenset(),
        _any_tensor(lambda t: len(t.shape) > _MOST_DIMENSIONS),
        "may fail on mps: a tensor has more than 16 dimensions.",
        "The kernels keep sizes and strides in arrays of 16.",
        "Join dimensions with reshape before this line.",
    ),
)
"""The conditions, the specific before the general."""
