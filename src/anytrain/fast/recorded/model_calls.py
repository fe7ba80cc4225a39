"""A prepared model's forward and its backward, each recorded: what a user's own loop replays.

The user's lines run between the two, op by op. What a forward returns are copies, so they live as
long as somebody keeps them; gradients are in each parameter's `.grad`, as after any backward.

A forward whose backward has not come yet keeps its activations in the memory of its recording. So
the next forward takes another slot: the recordings of one slot share memory, those of two never.

INVARIANT: outputs, gradients and random numbers are those of the same calls op by op.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from anytrain.core.errors import Unsupported
from anytrain.engine.tree import Slot, put_together, take_apart
from anytrain.fast.recorded.cuda_graph import Draws
from anytrain.fast.recorded.recordings import Manner, Recorder, Recording, Recordings
from anytrain.fast.shortcuts.lazy_tensor import real, saving_hooks
from anytrain.fast.shortcuts.shortcuts import Shortening

MOST_PENDING = 4
"""Forwards, of all models together, that may wait for their backward at once."""
_MOST_FREEZINGS = 4
"""Sets of frozen parameters that a model is recorded with: a GAN's two turns have two."""
_PLAIN = (str, int, float, bool, type(None))
CALLS = Manner("a model's forward and backward", takes_differentiable=True, owns_gradients=False)
_OWN_REFERENCES = 3
"""To a gradient that nobody keeps: the table's, a loop's, and that of whoever counts them."""


class PhaseRecorder(Recorder, Protocol):
    """A recorder whose generator can be put back to where a forward began."""

    def place(self) -> Any:
        """Return where the generator stands."""

    def drawing_again(self, place: Any) -> AbstractContextManager[None]:
        """Let the block draw the numbers that were drawn from that place on."""


class Pending:
    """A forward whose backward may still come."""

    def __init__(self) -> None:
        self.is_done = False


class RecorderSlot:
    """One recorder and its memory: busy from a forward until its backward is done."""

    def __init__(self, recorder: PhaseRecorder) -> None:
        self.recorder = recorder
        self._pending: weakref.ref[Pending] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no forward of it waits for its backward."""
        pending = None if self._pending is None else self._pending()
        return pending is None or pending.is_done

    def take(self) -> Pending:
        """Keep the slot until the forward's backward is through, or nobody can ask for it."""
        pending = Pending()
        self._pending = weakref.ref(pending)
        return pending


class RecorderSlots:
    """The slots of a run, which all of its models share."""

    def __init__(self, make: Callable[[], PhaseRecorder]) -> None:
        self._make = make
        self._slots: list[RecorderSlot] = []

    def free(self) -> RecorderSlot | None:
        """Return the first slot that is free; None where too many forwards are pending."""
        found = next((slot for slot in self._slots if slot.is_free), None)
        if found is None and len(self._slots) < MOST_PENDING:
            found = RecorderSlot(self._make())
            self._slots.append(found)
        return found


class Gradients:
    """One buffer for each parameter of a model; it becomes the parameter's `.grad`."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, torch.Tensor] = {}

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a parameter's buffer."""
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.zeros_like(parameter, requires_grad=False)
        return self._buffers[parameter]

    def make_room(self, parameters: list[nn.Parameter]) -> None:
        """Let nobody hold the buffers of these, which a backward is about to write over."""
        earlier = [p for p in parameters if p.grad is not None and p.grad is self._buffers[p]]
        if earlier:  # accumulated: from here on the sum has memory of its own
            held: list[Any] = [parameter.grad for parameter in earlier]
            sums = [torch.empty_like(gradient) for gradient in held]
            torch._foreach_copy_(sums, held)
            held.clear()
            for parameter, total in zip(earlier, sums, strict=True):
                parameter.grad = total
        for parameter in parameters:
            buffer = self._buffers[parameter]
            if sys.getrefcount(buffer) > _OWN_REFERENCES:
                # Somebody keeps it: the values move out, and the address stays the recordings'.
                own = buffer.detach()
                buffer.data = buffer.clone()
                self._buffers[parameter] = own

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Give each of these what the backward has left, added to what it has."""
        sums, more = [], []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = self._buffers[parameter]
            else:
                sums.append(parameter.grad)
                more.append(self._buffers[parameter])
        if sums:
            torch._foreach_add_(sums, more)


@dataclass(slots=True)
class Halves:
    """The forward and the backward of one recording: where they read and write."""

    skeleton: Any
    """The outputs' tree without its tensors."""
    outputs: list[torch.Tensor]
    """Written over by each replay of the forward."""
    differentiable: list[bool]
    """Which of them have a gradient."""
    sent: dict[int, torch.Tensor]
    """Where the backward reads the gradients of outputs, by their place."""
    replay_backward: Callable[[], None]
    of_inputs: dict[int, torch.Tensor]
    """The gradients of the inputs that want one, by their place."""
    parameters: list[nn.Parameter]
    """Those that get a gradient."""


class ModelShortening(Shortening):
    """The shortcuts of a model's forward and backward; the update is not their business."""

    knows_use: Callable[[], bool] = staticmethod(lambda: True)
    """Whether it is known which outputs get gradients."""

    def is_ready(self) -> bool:
        """Whether a recording may begin."""
        return self.knows_use() and super().is_ready()

    def passes(self) -> AbstractContextManager[None]:
        """Return what the forward runs in."""
        return nullcontext() if self.taken is None else self.taken.forward()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's gradient, wherever the backward has left it."""
        return parameter.grad if self.taken is None else self.taken.gradient(parameter)


class Variant:
    """A model's recordings in one slot, with one set of frozen parameters."""

    is_whole = True

    def __init__(
        self,
        model: RecordedModel,
        slot: RecorderSlot,
        make: Callable[[Recorder], Recordings],
        shortening: ModelShortening,
    ) -> None:
        self._model, self.slot, self.shortening = model, slot, shortening
        shortening.knows_use = lambda: self.kind in self.used
        self.recordings = make(_BothWays(self))
        self.used: dict[Hashable, set[int]] = {}
        """The outputs that got gradients when calls of a kind ran op by op."""
        self.kind: Hashable = None
        """Of the call at hand."""
        self.needs_grad: list[bool] = []
        """Which of its inputs want a gradient."""
        self._inputs: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []

    def compute(self, tree: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run the forward on these inputs, to be recorded."""
        given, tensors = take_apart(tree)
        self._inputs = [
            tensor.requires_grad_(wants)
            for tensor, wants in zip(tensors, self.needs_grad, strict=True)
        ]
        with self.shortening.passes():
            args, kwargs = put_together(given, tensors)
            skeleton, made = opened(self._model.forward(*args, **kwargs))
            self._made = [real(tensor) for tensor in made]
        return skeleton, self._made

    def record(
        self, forward: Callable[[], Any], draws: Draws | None
    ) -> tuple[Callable[[], None], Halves]:
        """Record forward and backward; return what replays the forward, and where all lies."""
        if draws is not None and draws.marks:
            raise RuntimeError("blocks that are checkpointed compute their forward twice")
        for parameter in self._model.parameters:
            self._model.gradients.of(parameter)
        recorder = self.slot.recorder
        replay, (skeleton, made) = recorder.record(forward, draws)
        wanted = [n for n in sorted(self.used[self.kind]) if made[n].requires_grad]
        sent = {n: torch.zeros_like(made[n], requires_grad=False) for n in wanted}
        replay_backward, found = recorder.record(partial(self._backward, sent), None)
        learnt = [tensor.requires_grad for tensor in made]
        outputs = [tensor.detach() for tensor in made]
        self._made, self._inputs = [], []
        return replay, Halves(skeleton, outputs, learnt, sent, replay_backward, *found)

    def _backward(
        self, sent: dict[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], list[nn.Parameter]]:
        """Run the backward of what `compute` has made; return whose gradients came of it."""
        own = self._model.parameters
        held = [parameter.grad for parameter in own]
        try:
            for parameter in own:
                parameter.grad = None
            torch.autograd.backward([self._made[n] for n in sent], list(sent.values()))
            inputs = {n: x.grad for n, x in enumerate(self._inputs) if x.grad is not None}
            return inputs, self._gather()
        finally:
            for parameter, gradient in zip(own, held, strict=True):
                parameter.grad = gradient
            self.shortening.clear()

    def _gather(self) -> list[nn.Parameter]:
        """Copy gradients to where they are read; return whose there were."""
        found: list[nn.Parameter] = []
        made: list[torch.Tensor] = []
        for parameter in self._model.parameters:
            gradient = self.shortening.gradient(parameter)
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError("a gradient is sparse")
            found.append(parameter)
            made.append(gradient)
        torch._foreach_copy_([self._model.gradients.of(parameter) for parameter in found], made)
        return found

    def observed(self, outputs: Any) -> Any:
        """Return what a call has given op by op, so that its backward shows what it asks for."""
        pending, kind = self.slot.take(), self.kind
        skeleton, tensors = opened(outputs)

        def seen(place: int, gradient: torch.Tensor) -> None:
            pending.is_done = True
            problem = self._model.problem_of_backward()
            if problem is not None:
                self._model.stop(problem)
            self.used.setdefault(kind, set()).add(place)

        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # Another place in the graph: the model's own use of the tensor is not the user's.
                tensors[place] = tensor.view_as(tensor)
                tensors[place].register_hook(partial(seen, place))
        return closed(skeleton, tensors)


class RecordedModel:
    """A model's forward, replayed where it can be; the calls of a user's loop come here."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        slots: RecorderSlots,
        make: Callable[[Recorder], Recordings],
        shorten: Callable[[], ModelShortening],
        tell: Callable[[str, str], None],
    ) -> None:
        self.model, self.forward = model, forward
        self.slots, self._make, self._shorten, self._tell = slots, make, shorten, tell
        self.parameters = list(model.parameters())
        self._anchor = torch.zeros((), requires_grad=True)
        """What ties outputs to the graph of gradients: the parameters are no inputs of it."""
        self._variants: dict[Hashable, Variant] = {}
        self.gradients = Gradients()
        self.is_on = True
        """Whether it is replayed: not inside of a step that is recorded as a whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model makes of these inputs."""
        variant = self._variant() if self.is_on and self._may_replay() else None
        if variant is None:
            return self.forward(*args, **kwargs)
        given = args, kwargs
        variant.kind = _kind(kwargs)
        variant.needs_grad = [tensor.requires_grad for tensor in take_apart(given)[1]]
        found = variant.recordings.find(variant, given, variant.kind)
        if variant.recordings.stopped is not None:
            self.stop(None)
        if found is None:
            with variant.recordings.observed(variant):
                outputs = self.forward(*args, **kwargs)
            return variant.observed(outputs) if self.is_on else outputs
        call = Call(self, variant, found, given)
        learnt = [tensor for tensor in found[1] if tensor.requires_grad]
        outputs = _replayed(call, self._anchor, *learnt)
        return closed(call.halves.skeleton, outputs)

    def _may_replay(self) -> bool:
        """Whether this call is one of a training: nothing but the device's work depends on it."""
        return (
            self.model.training
            and torch.is_grad_enabled()
            and saving_hooks() is None
            and torch._C._len_torch_dispatch_stack() == 0
            and torch._C._len_torch_function_stack() == 0
            and not torch.compiler.is_compiling()
            and not _is_capturing()
        )

    def _variant(self) -> Variant | None:
        slot = self.slots.free()
        if slot is None:
            self.stop(f"the outputs of more than {MOST_PENDING} forwards wait for their backward")
            return None
        frozen = tuple(parameter.requires_grad for parameter in self.parameters)
        key = id(slot), frozen
        if key not in self._variants:
            if len(self._variants) >= MOST_PENDING * _MOST_FREEZINGS:
                self.stop("parameters are frozen in ever other sets")
                return None
            self._variants[key] = Variant(self, slot, self._make, self._shorten())
        return self._variants[key]

    def problem_of_backward(self) -> str | None:
        """Say why the backward that is at work cannot be replayed; None where it can."""
        if torch.is_grad_enabled():
            return "a gradient of a gradient is asked for (create_graph=True)"
        with torch.enable_grad():
            wanting = [p.expand_as(p).grad_fn for p in self.parameters if p.requires_grad]
        nodes: list[Any] = [each.next_functions[0][0] for each in wanting if each is not None]
        try:  # torch tells what it would do with a parameter's node, and refuses to for `grad`
            is_usual = any(map(torch._C._will_engine_execute_node, nodes)) or not nodes
        except RuntimeError:
            is_usual = False
        return None if is_usual else "gradients are asked for by torch.autograd.grad"

    def stop(self, because: str | None) -> None:
        """Run op by op from here on; None where the reason was told."""
        self.is_on = False
        self.release()
        if because is not None:
            self._tell("eager", because)

    def release(self) -> None:
        """Let go of the recordings and their memory."""
        for variant in self._variants.values():
            variant.recordings.forget()
        self._variants.clear()


class Call:
    """One replayed forward, until nobody can ask for its backward any more."""

    def __init__(
        self,
        model: RecordedModel,
        variant: Variant,
        found: tuple[Recording, list[torch.Tensor]],
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self._model, self._given = model, given
        self._recording, self._tensors = found
        self.halves: Halves = self._recording.outputs
        self._recorder, self._pending = variant.slot.recorder, variant.slot.take()
        self._place = self._recorder.place()

    def forward(self) -> list[torch.Tensor]:
        """Replay the forward; return where its outputs lie."""
        self._recording(self._tensors)
        return self.halves.outputs

    def backward(self, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Replay the backward; return the gradients of the inputs that want one."""
        if torch.is_grad_enabled():
            raise Unsupported(
                "Cannot take the gradient of a gradient here: this forward was replayed.",
                why="a recorded backward gives numbers, not a graph to go through once more.",
                fix='set ANYTRAIN_STEP=eager, or pass step_engine="eager", where create_graph is '
                "used from some step on only.",
            )
        halves = self.halves
        asked = {place for place, gradient in enumerate(given) if gradient is not None}
        if self._pending.is_done or not asked <= halves.sent.keys():
            return self._again(given)
        for place, into in halves.sent.items():
            gradient = given[place]
            _ = into.zero_() if gradient is None else into.copy_(gradient)
        gradients = self._model.gradients
        gradients.make_room(halves.parameters)
        halves.replay_backward()
        gradients.add(halves.parameters)
        self._pending.is_done = True
        wanting = (place for place, tensor in enumerate(self._tensors) if tensor.requires_grad)
        found = (halves.of_inputs.get(place) for place in wanting)
        return [None if gradient is None else gradient.clone() for gradient in found]

    def _again(self, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Compute both op by op: a backward for the second time, or of another output."""
        skeleton, tensors = take_apart(self._given)
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        args, kwargs = put_together(skeleton, inputs)
        with torch.enable_grad(), self._recorder.drawing_again(self._place):
            made = opened(self._model.forward(*args, **kwargs))[1]
            asked = [(made[n], g) for n, g in enumerate(given) if g is not None]
            torch.autograd.backward([x for x, _ in asked], [g for _, g in asked])
        return [tensor.grad for tensor in inputs if tensor.requires_grad]


class _BothWays:
    """A recorder of forwards that records each one's backward with it."""

    def __init__(self, variant: Variant) -> None:
        self._variant, self._inner = variant, variant.slot.recorder

    def record(self, work: Callable[[], Any], draws: Draws | None) -> Any:
        """Return what replays the forward, and where it and its backward lie."""
        return self._variant.record(work, draws)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Replayed(torch.autograd.Function):
    """A replayed forward, in the graph of gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Any, *learnt: Any) -> Any:
        ctx.call = call
        outputs = tuple(tensor.clone() for tensor in call.forward())
        has = call.halves.differentiable
        plain = (tensor for tensor, wants in zip(outputs, has, strict=True) if not wants)
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return (None, None, *ctx.call.backward(given))


_replayed: Callable[..., tuple[torch.Tensor, ...]] = _Replayed.apply


def _kind(kwargs: dict[str, Any]) -> Hashable:
    """Return what calls of like tensors must have in common besides."""
    return (
        tuple(kwargs),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # noqa: TID251


class _Object:
    """An object of a class of the model's own, as a cache is, with what its attributes hold."""

    def __init__(self, kind: type, held: Any) -> None:
        self.kind, self.held = kind, held


def opened(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a model's outputs with slots in place of all tensors, those of objects too.

    Unlike `take_apart`, which leaves objects of a class of their own as they are.
    """
    tensors: list[torch.Tensor] = []
    return _opened(tree, tensors), tensors


def _opened(part: Any, tensors: list[torch.Tensor]) -> Any:
    # No closure: one that calls itself would hold the tensors until garbage is collected.
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return Slot(len(tensors) - 1)
    if isinstance(part, Mapping):
        return _like(part, {key: _opened(value, tensors) for key, value in part.items()})
    if isinstance(part, (list, tuple)):
        return _like(part, [_opened(value, tensors) for value in part])
    held = getattr(part, "__dict__", None)
    if isinstance(part, (*_PLAIN, type)) or held is None:
        return part
    return _Object(type(part), _opened(held, tensors))


def closed(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the outputs that `opened` has taken apart, with these tensors."""
    if isinstance(skeleton, Slot):
        return tensors[skeleton.index]
    if isinstance(skeleton, _Object):
        made: Any = object.__new__(skeleton.kind)
        vars(made).update(closed(skeleton.held, tensors))
        return made
    if isinstance(skeleton, Mapping):
        return _like(skeleton, {key: closed(value, tensors) for key, value in skeleton.items()})
    if isinstance(skeleton, (list, tuple)):
        return _like(skeleton, [closed(value, tensors) for value in skeleton])
    return skeleton


def _like(original: Any, values: Any) -> Any:
    kind: Any = type(original)
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return kind(*values)
    return kind(values)
