"""Serve callbacks of both kinds: HF's, which set flags, and the house's, which return requests.

The flags live here, in one mutable control object that HF-style callbacks see. The loop gets
requests. Who listens to which event is worked out when the list of callbacks changes, so an
event that nobody overrides costs next to nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from anytrain.core.errors import BadInput, BadType, add_to_message
from anytrain.core.events import EVENT_KINDS, INSIDE_A_STEP, Event, EventKind, Request
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks.calls import EventCalls
from anytrain.doors.callbacks.control import CLEARED_BY, TrainerControl, ask, standing
from anytrain.doors.callbacks.flow import DefaultFlowCallback
from anytrain.doors.callbacks.hf import ExportableState, TrainerCallback
from anytrain.doors.callbacks.progress import ProgressCallback
from anytrain.doors.callbacks.state import TrainerState, exported

_METHODS: dict[EventKind, str] = {kind: f"on_{kind}" for kind in EVENT_KINDS}
_KINDS = {method: kind for kind, method in _METHODS.items()}


class _Listener(NamedTuple):
    callback: Any
    method: str
    """The method of an HF-style callback; "after" for one of the house."""


class Callbacks(EventCalls):
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
        if self._listening(kind):
            self.control = self.pass_through(kind, args, state, self.control, extra)
        elif kind in CLEARED_BY:
            CLEARED_BY[kind](self.control)
        return standing(self.control)

    def pass_through(
        self,
        kind: EventKind,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        extra: dict[str, Any],
    ) -> TrainerControl:
        """Let every callback of this event see and change `control`; return what came out."""
        clear = CLEARED_BY.get(kind)
        if clear is not None:
            clear(control)
        listeners = self._listening(kind)
        if not listeners:
            return control
        known = self._known(extra)
        for listener in listeners:
            try:
                if listener.method == "after":
                    ask(control, listener.callback.after(_event(kind, state, extra)))
                    continue
                result = getattr(listener.callback, listener.method)(args, state, control, **known)
            except Exception as error:
                add_to_message(
                    error, f"Raised by the callback {_name(listener.callback)}, on {kind}."
                )
                raise
            if result is not None:
                control = _checked(result, listener)
        return control

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
        """Put callbacks of the same class names back into the states that were saved.

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
        # People change the list itself, too, so it is compared, object by object.
        current, known = self.callbacks, self._indexed
        if len(current) != len(known) or not all(map(operator.is_, current, known)):
            self._listeners = {kind: _listeners(current, kind) for kind in EVENT_KINDS}
            self._indexed = list(current)
        return self._listeners[kind]

    def _known(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "tokenizer": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            **extra,
        }


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


def _event(kind: EventKind, state: TrainerState, extra: Mapping[str, Any]) -> Event:
    values = extra.get("logs") or extra.get("metrics") or {}
    frozen = MappingProxyType(dict(values))
    return Event(kind, state.global_step, float(state.epoch or 0), state.max_steps, frozen)


def _checked(result: Any, listener: _Listener) -> TrainerControl:
    if hasattr(result, "should_training_stop"):
        control: TrainerControl = result
        return control
    raise BadType(
        f"{_name(listener.callback)}.{listener.method} returned a {type(result).__name__}.",
        why="what an event returns replaces the control object, so it must be one.",
        fix="return control, or nothing.",
    )
