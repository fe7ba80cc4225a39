"""What kernels of mps ask of shapes and dtypes, and what to write where there is none.

Each condition is one that a kernel of torch states itself (a check at its beginning); the file of
torch's sources is named beside it, and what is checked is told in our words. Some hold only below
a version of macOS, which a preflight cannot know: so these things may fail, and are not certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from anytrain.insight.preflight.trace import Op, TensorFacts

_MOST_ELEMENTS = 2**31 - 1
_MOST_DIMENSIONS = 16
_LARGEST_CONVOLVED = 2**16
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
_AVERAGE = frozenset({"_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"})
_MAXIMUM = frozenset({"adaptive_max_pool2d", "adaptive_max_pool2d_backward"})
_CONVOLUTION = frozenset({"convolution", "convolution_overrideable", "_convolution"})
_INSTEAD = {
    "_adaptive_avg_pool3d": "avg_pool3d with a fixed window, or mean over the three dimensions "
    "where the output is one",
    "adaptive_max_pool3d": "max_pool3d with a fixed window",
    "channel_shuffle": "x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)",
    "_ctc_loss": "the loss on the CPU: ctc_loss(log_probs.cpu(), targets.cpu(), ...)",
    "fractional_max_pool2d": "max_pool2d or adaptive_max_pool2d",
    "fractional_max_pool3d": "max_pool3d",
    "frexp": "exponent = x.abs().log2().floor() + 1; mantissa = x * 2 ** -exponent",
    "geqrf": "linalg.qr",
    "ormqr": "linalg.qr, and a product with its Q",
    "_linalg_eigh": "the decomposition on the CPU: torch.linalg.eigh(x.cpu())",
    "_linalg_eigvals": "the eigenvalues on the CPU: torch.linalg.eigvals(x.cpu())",
    "linalg_eig": "the decomposition on the CPU: torch.linalg.eig(x.cpu())",
    "_linalg_svd": "the decomposition on the CPU: torch.linalg.svd(x.cpu())",
    "linalg_svd": "linalg.qr where it is enough, or decompose every so many steps",
    "linalg_lstsq": "the normal equations: torch.linalg.solve(a.mT @ a, a.mT @ b)",
    "linalg_ldl_factor_ex": "linalg.lu_factor",
    "logspace": "base ** torch.linspace(start, end, steps)",
    "mode": "one_hot counts and argmax, for few distinct values",
    "multi_margin_loss": "(margin - x.gather(1, y[:, None]) + x).clamp(min=0), without y's column",
    "multilabel_margin_loss_forward": "binary_cross_entropy_with_logits, if the task allows it",
    "_pdist_forward": "torch.cdist(x, x)[torch.triu_indices(n, n, 1).unbind()]",
    "put": "index_put on the flattened tensor",
    "rrelu_with_noise": "leaky_relu",
    "segment_reduce": "scatter_reduce with an index per element",
    "embedding_renorm_": "scaling the weight after each update, outside of forward (max_norm=None)",
}


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


# -- what to write instead ------------------------------------------------------------------------


def advice(name: str) -> str:
    """Return what to write instead, as a sentence.

    >>> advice("geqrf.a")
    'Use linalg.qr.'
    """
    stem = name.partition(".")[0]
    known = _INSTEAD.get(stem) or _INSTEAD.get(stem.removesuffix("_"))
    if known:
        return f"Use {known}."
    if "backward" in stem:
        return "Use another operation in forward, or run that part of the model on the CPU."
    return "Use another operation, or run it on the CPU: f(x.cpu()).to(x.device)."
