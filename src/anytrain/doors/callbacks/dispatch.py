"""Tell callbacks of both kinds: HF's, which set flags, and the house's, which return requests.

The flags live here, in one mutable control object that HF-style callbacks see. The loop gets
requests. Who listens to which event is worked out when the list of callbacks changes, so an
event that nobody overrides costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from anytrain.core.errors import BadInput, BadType, add_to_message
from anytrain.core.events import (
    EVENT_KINDS,
    INSIDE_A_STEP,
    NO_REQUESTS,
    Event,
    EventKind,
    Request,
)
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks.callback import (
    ExportableState,
    TrainerCallback,
    TrainerState,
    exported,
)
from anytrain.doors.callbacks.progress import ProgressCallback

_METHODS: dict[EventKind, str] = {kind: f"on_{kind}" for kind in EVENT_KINDS}
_KINDS = {method: kind for kind, method in _METHODS.items()}
_VALUES: Mapping[EventKind, str] = {"log": "logs", "evaluate": "metrics", "predict": "metrics"}
"""The keyword under which callbacks get the values that come with an event."""
_CLEARED: Mapping[EventKind, tuple[str, ...]] = {
    "train_begin": ("should_training_stop",),
    "epoch_begin": ("should_epoch_stop",),
    "step_begin": ("should_log", "should_evaluate", "should_save"),
    "evaluate": ("should_evaluate",),
    "save": ("should_save",),
    "log": ("should_log",),
}
"""What an event clears before any callback hears of it: a wish fulfilled, or out of date."""
_FLAGS: dict[Request, str] = {
    "log": "should_log",
    "evaluate": "should_evaluate",
    "save": "should_save",
    "stop_epoch": "should_epoch_stop",
    "stop": "should_training_stop",
}


@dataclass
class TrainerControl(ExportableState):
    """What callbacks have asked for and the loop has not done yet."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """Return the flags as they stand."""
        return {"args": dataclasses.asdict(self), "attributes": {}}

    # HF's Trainer calls these; the dispatcher clears flags by its table.
    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_log = self.should_evaluate = self.should_save = False


def standing(control: TrainerControl) -> frozenset[Request]:
    """Return the requests that stand in the flags now.

    >>> sorted(standing(TrainerControl(should_save=True, should_training_stop=True)))
    ['save', 'stop']
    """
    return frozenset(request for request, flag in _FLAGS.items() if getattr(control, flag))


class DefaultFlowCallback(TrainerCallback):
    """Turn the strategies of the arguments into requests, by steps or by epochs.

    The last step asks for an evaluation and a save of its own where these go by steps. A save
    strategy "best" is not asked for here: it hangs on what an evaluation finds.
    """

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for what falls due at this step, and for the end after the last."""
        step = state.global_step
        is_last = step >= state.max_steps
        if is_last:
            control.should_training_stop = True
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step:
            control.should_evaluate |= is_last or step % state.eval_steps == 0
        if args.save_strategy == "steps":
            control.should_save |= is_last or (
                # An interval of 0 means only at the end.
                state.save_steps > 0 and step % state.save_steps == 0
            )
        return control

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for what goes by epochs."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


class _Listener(NamedTuple):
    callback: Any
    method: str
    """The method of an HF-style callback; "after" for one of the house."""


class Callbacks(TrainerCallback):
    """A run's callbacks, in order, and the control object that passes through them."""

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.callbacks: list[Any] = []
        self.control = TrainerControl()
        self.model, self.processing_class = model, processing_class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self._indexed: list[Any] = []
        self._listeners: dict[EventKind, list[_Listener]] = {kind: [] for kind in EVENT_KINDS}
        for callback in callbacks:
            self.add_callback(callback)
        if not any(isinstance(callback, DefaultFlowCallback) for callback in self.callbacks):
            give_notice(
                "There is no DefaultFlowCallback among the callbacks "
                f"({', '.join(self.callback_list.split()) or 'none'}): nothing logs, evaluates, "
                "saves or ends the training but what they ask for.",
                stacklevel=3,
            )

    def tell(
        self, kind: EventKind, args: Any, state: TrainerState, **extra: Any
    ) -> frozenset[Request]:
        """Tell every callback of an event; return all requests that stand after it.

        `extra` goes to the callbacks by name: `logs=` with "log", `metrics=` with "evaluate".
        """
        control = self.control = self.pass_through(kind, args, state, self.control, extra)
        is_quiet = not (
            control.should_log
            or control.should_evaluate
            or control.should_save
            or control.should_epoch_stop
            or control.should_training_stop
        )
        return NO_REQUESTS if is_quiet else standing(control)

    def pass_through(
        self,
        kind: EventKind,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        extra: dict[str, Any],
    ) -> TrainerControl:
        """Let every callback of this event see and change `control`; return what came out."""
        for flag in _CLEARED.get(kind, ()):
            setattr(control, flag, False)
        # People change the list itself, too, so it is compared, object by object.
        current, known = self.callbacks, self._indexed
        if len(current) != len(known) or not all(map(operator.is_, current, known)):
            self._index()
        named = {
            "model": self.model,
            "processing_class": self.processing_class,
            "tokenizer": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            **extra,
        }
        for callback, method in self._listeners[kind]:
            try:
                if method == "after":
                    self._ask(callback, kind, state, control, extra)
                    continue
                result = getattr(callback, method)(args, state, control, **named)
            except Exception as error:
                add_to_message(error, f"Raised by the callback {_name(callback)}, on {kind}.")
                raise
            if hasattr(result, "should_training_stop"):
                control = result
            elif result is not None:
                raise _not_control(result, callback, method)
        return control

    def _ask(
        self,
        callback: Any,
        kind: EventKind,
        state: TrainerState,
        control: TrainerControl,
        extra: Mapping[str, Any],
    ) -> None:
        """Tell a callback of the house, and raise the flag of every request it returns."""
        values = MappingProxyType(dict(extra.get("logs") or extra.get("metrics") or {}))
        epoch = float(state.epoch or 0)
        event = Event(kind, state.global_step, epoch, state.max_steps, values)
        for request in callback.after(event):
            setattr(control, _FLAGS[request], True)

    def call_event(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell of an event by the name of its method, "on_log" for example."""
        if event not in _KINDS:
            raise BadInput(
                f"There is no event {event!r}.",
                why="callbacks know these: " + ", ".join(_KINDS) + ".",
                fix="name one of them.",
            )
        return self.pass_through(_KINDS[event], args, state, control, kwargs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback at the end: an object, or a class that needs no arguments."""
        made = callback() if isinstance(callback, type) else callback
        if not _is_callback(made):
            raise BadType(
                f"A {type(made).__name__} is not a callback.",
                why="it has neither a method on_... of the 16 events nor a method after(event).",
                fix="inherit from TrainerCallback, and override the events you care for.",
            )
        if type(made) in [type(other) for other in self.callbacks]:
            give_notice(
                f"There is a {type(made).__name__} among the callbacks already; both are called.",
                stacklevel=3,
            )
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        """Take out the first callback of this class, or this one; return it, None without."""
        for found in self.callbacks:
            if _matches(found, callback):
                self.callbacks.remove(found)
                return found
        return None

    def remove_callback(self, callback: Any) -> None:
        """Take out the first callback of this class, if any, or this very one."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise BadInput(
                f"Cannot remove this {type(callback).__name__}.",
                why="it is not among the callbacks: " + ", ".join(self.callback_list.split()),
                fix="remove one that was added, or give its class.",
            )

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, one a line, in the order they are told."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    @property
    def requests(self) -> frozenset[Request]:
        """What stands in the flags now."""
        return standing(self.control)

    def looks_inside(self) -> list[str]:
        """Return the names of callbacks that watch the middle of a step.

        A step that one call computes whole has no middle, and cannot serve them.
        """
        names = [
            _name(listener.callback)
            for kind in sorted(INSIDE_A_STEP)
            for listener in self._listening(kind)
        ]
        return list(dict.fromkeys(names))

    def listens(self, kind: EventKind) -> bool:
        """Whether somebody is told of this event."""
        return bool(self._listening(kind))

    def exported(self) -> dict[str, Any]:
        """Return what callbacks and control want saved, as `TrainerState` keeps it."""
        return exported(self.stateful())

    def stateful(self) -> list[Any]:
        """Return the callbacks, and the control object, whose state travels in a checkpoint."""
        everyone = [*self.callbacks, self.control]
        return [one for one in everyone if isinstance(one, ExportableState)]

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Replace callbacks by ones made from the states that were saved, as HF does when asked.

        Each is replaced, at its place in the order, by a new one that its `from_state` makes.
        """
        waiting = {name: list(s) if isinstance(s, list) else [s] for name, s in stored.items()}
        absent = set(waiting) - {type(one).__name__ for one in [*self.callbacks, self.control]}
        for place, callback in enumerate(self.callbacks):
            states = waiting.get(type(callback).__name__)
            if states and isinstance(callback, ExportableState):
                self.callbacks[place] = type(callback).from_state(states.pop(0))
        control = waiting.get(type(self.control).__name__)
        if control:
            self.control = type(self.control).from_state(control[0])
        if absent:
            give_notice(
                f"The checkpoint holds the state of {', '.join(sorted(absent))}, which this run "
                "does not use; it was left out.",
                stacklevel=3,
            )

    def take_up(self, stored: Mapping[str, Any]) -> None:
        """Give each callback that was made with the same arguments its saved attributes.

        One that was made with others begins afresh: they were changed on purpose.
        """
        waiting = {name: list(s) if isinstance(s, list) else [s] for name, s in stored.items()}
        for callback in self.callbacks:
            states = waiting.get(type(callback).__name__)
            if not states or not isinstance(callback, ExportableState):
                continue
            saved = states.pop(0)
            if saved.get("args", {}) == callback.state().get("args", {}):
                for name, value in saved.get("attributes", {}).items():
                    setattr(callback, name, value)

    def close(self) -> None:
        """Take progress bars off the screen, where an exception ended a training."""
        for callback in self.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.close()

    def _listening(self, kind: EventKind) -> list[_Listener]:
        self._index()
        return self._listeners[kind]

    def _index(self) -> None:
        self._listeners = {kind: _listeners(self.callbacks, kind) for kind in EVENT_KINDS}
        self._indexed = list(self.callbacks)


def _listeners(callbacks: Iterable[Any], kind: EventKind) -> list[_Listener]:
    found = []
    for callback in callbacks:
        method = _METHODS[kind] if _has_events(callback) else "after"
        listens = _overrides(callback, method) if method != "after" else _watches(callback, kind)
        if listens:
            found.append(_Listener(callback, method))
    return found


def _watches(callback: Any, kind: EventKind) -> bool:
    """Whether a callback of the house is told: of what it names, else of all but a step's inside.

    Watching the middle of a step has a price, so it takes a wish.
    """
    named = getattr(callback, "watches", None)
    return kind not in INSIDE_A_STEP if named is None else kind in named


def _overrides(callback: Any, method: str) -> bool:
    """Whether the callback does something of its own on this event."""
    if method in getattr(callback, "__dict__", {}):
        return True
    for kind in type(callback).__mro__:
        if method in vars(kind):
            return not _is_template(kind)
    return hasattr(callback, method)


def _is_template(kind: type) -> bool:
    """Whether the class is TrainerCallback, ours or HF's, whose events do nothing."""
    return kind is TrainerCallback or (
        kind.__name__ == "TrainerCallback" and kind.__module__.startswith("transformers.")
    )


def _has_events(callback: Any) -> bool:
    return any(hasattr(callback, method) for method in _METHODS.values())


def _is_callback(thing: Any) -> bool:
    return _has_events(thing) or callable(getattr(thing, "after", None))


def _matches(found: Any, wanted: Any) -> bool:
    return isinstance(found, wanted) if isinstance(wanted, type) else bool(found == wanted)


def _name(callback: Any) -> str:
    return type(callback).__name__


def _not_control(result: Any, callback: Any, method: str) -> BadType:
    return BadType(
        f"{_name(callback)}.{method} returned a {type(result).__name__}.",
        why="what an event returns replaces the control object, so it must be one.",
        fix="return control, or nothing.",
    )


def _passing(kind: EventKind) -> Callable[..., TrainerControl]:
    """Return the method of an event, for code that calls HF's callback handler itself."""

    def on_event(
        self: Callbacks, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.pass_through(kind, args, state, control, kwargs)

    def on_values(
        self: Callbacks,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        values: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> TrainerControl:
        return self.pass_through(kind, args, state, control, {_VALUES[kind]: values, **kwargs})

    return on_values if kind in _VALUES else on_event


for _kind, _method in _METHODS.items():
    setattr(Callbacks, _method, _passing(_kind))
