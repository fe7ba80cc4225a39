from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anytrain.core.errors import BadInput, BadType, Notice
from anytrain.core.events import EVENT_KINDS, Event, Request
from anytrain.doors.callbacks import (
    Callbacks,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

ARGS = SimpleNamespace()


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.told: list[str] = []


def _watch(name: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(name)

    return method


for _kind in EVENT_KINDS:
    setattr(Recorder, f"on_{_kind}", _watch(_kind))


class StopsOnLog(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = True
        return control


class Idle(TrainerCallback):
    pass


class House:
    """A callback of the house: it saves whenever the loss is low."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def after(self, event: Event) -> frozenset[Request]:
        self.events.append(event)
        return frozenset(("save",)) if event.values.get("loss", 1.0) < 0.5 else frozenset()


def made(*callbacks: Any) -> Callbacks:
    """Callbacks without the default flow, whose absence is a notice of its own."""
    with pytest.warns(Notice, match="no DefaultFlowCallback"):
        return Callbacks(callbacks)


def test_every_one_of_the_16_events_reaches_a_callback_in_order() -> None:
    recorder = Recorder()
    callbacks = made(recorder)
    for kind in EVENT_KINDS:
        assert callbacks.tell(kind, ARGS, TrainerState()) == frozenset()
    assert recorder.told == list(EVENT_KINDS)
    assert len(EVENT_KINDS) == 16


def test_callbacks_get_what_hf_gives_them_by_name() -> None:
    given: dict[str, Any] = {}

    class Asks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given.update(kwargs)

    with pytest.warns(Notice):
        callbacks = Callbacks([Asks], "model", "tokens", "optimizer", "schedule")
    callbacks.train_dataloader, callbacks.eval_dataloader = "train", "eval"
    callbacks.tell("log", ARGS, TrainerState(), logs={"loss": 1.0})
    assert given == {
        "model": "model",
        "processing_class": "tokens",
        "tokenizer": "tokens",
        "optimizer": "optimizer",
        "lr_scheduler": "schedule",
        "train_dataloader": "train",
        "eval_dataloader": "eval",
        "logs": {"loss": 1.0},
    }


def test_a_flag_becomes_a_request_and_stands_until_its_event() -> None:
    callbacks = made(StopsOnLog)
    state = TrainerState()
    assert callbacks.tell("log", ARGS, state, logs={}) == {"stop"}
    assert callbacks.tell("step_begin", ARGS, state) == {"stop"}
    assert callbacks.tell("train_begin", ARGS, state) == frozenset()


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("train_begin", {"stop_epoch", "log", "evaluate", "save"}),
        ("epoch_begin", {"stop", "log", "evaluate", "save"}),
        ("step_begin", {"stop", "stop_epoch"}),
        ("log", {"stop", "stop_epoch", "evaluate", "save"}),
        ("evaluate", {"stop", "stop_epoch", "log", "save"}),
        ("save", {"stop", "stop_epoch", "log", "evaluate"}),
        ("step_end", {"stop", "stop_epoch", "log", "evaluate", "save"}),
        ("prediction_step", {"stop", "stop_epoch", "log", "evaluate", "save"}),
    ],
)
def test_an_event_clears_the_same_flags_as_hfs_handler(kind: Any, left: set[str]) -> None:
    from transformers.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback as TheirFlow,
        TrainerControl as TheirControl,
    )

    callbacks = made()
    callbacks.control = TrainerControl(True, True, True, True, True)
    assert callbacks.tell(kind, ARGS, TrainerState()) == left
    handler = CallbackHandler([TheirFlow()], None, None, None, None)
    handler.callbacks.clear()
    more = ({},) if kind in ("log", "evaluate") else ()
    theirs = getattr(handler, f"on_{kind}")(ARGS, None, TheirControl(*[True] * 5), *more)
    assert vars(theirs) == vars(callbacks.control)


def test_a_returned_control_replaces_the_one_before() -> None:
    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return TrainerControl(should_save=True)

    callbacks = made(Replaces)
    assert callbacks.tell("step_end", ARGS, TrainerState()) == {"save"}
    assert callbacks.requests == {"save"}


def test_an_event_that_returns_something_else_is_refused_by_name() -> None:
    class Confused(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return True

    with pytest.raises(BadType, match=r"Confused\.on_step_end returned a bool"):
        made(Confused).tell("step_end", ARGS, TrainerState())


def test_a_house_callback_is_told_frozen_events_and_its_requests_become_flags() -> None:
    house = House()
    callbacks = made(house)
    state = TrainerState(global_step=7, epoch=0.5, max_steps=20)
    assert callbacks.tell("log", ARGS, state, logs={"loss": 0.9}) == frozenset()
    assert callbacks.tell("log", ARGS, state, logs={"loss": 0.1}) == {"save"}
    assert callbacks.control.should_save
    event = house.events[-1]
    assert (event.kind, event.step, event.epoch, event.max_steps) == ("log", 7, 0.5, 20)
    with pytest.raises(TypeError):
        event.values["loss"] = 0.0  # type: ignore[index]


def test_a_house_callback_hears_of_a_steps_inside_only_if_it_says_so() -> None:
    plain, curious = House(), House()
    curious.watches = {"optimizer_step"}  # type: ignore[attr-defined]
    callbacks = made(plain)
    with pytest.warns(Notice, match="already"):
        callbacks.add_callback(curious)
    for kind in ("optimizer_step", "step_end"):
        callbacks.tell(kind, ARGS, TrainerState())
    assert [event.kind for event in plain.events] == ["step_end"]
    assert [event.kind for event in curious.events] == ["optimizer_step"]
    assert callbacks.looks_inside() == ["House"]


def test_only_callbacks_that_override_a_steps_inside_look_inside() -> None:
    class LooksAtGradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            pass

    assert made(Idle, StopsOnLog).looks_inside() == []
    assert made(Idle, LooksAtGradients, Recorder).looks_inside() == ["Recorder", "LooksAtGradients"]


def test_hfs_own_callbacks_are_served_and_their_empty_events_are_not_called() -> None:
    import transformers

    class Theirs(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_log = True
            return control

    callbacks = made(Theirs)
    assert callbacks.looks_inside() == []
    assert callbacks.tell("step_end", ARGS, TrainerState()) == {"log"}


def test_a_list_changed_by_hand_is_served_as_it_stands() -> None:
    callbacks = made(Idle)
    state = TrainerState()
    assert callbacks.tell("log", ARGS, state, logs={}) == frozenset()
    callbacks.callbacks[0] = StopsOnLog()
    assert callbacks.tell("log", ARGS, state, logs={}) == {"stop"}
    callbacks.callbacks.clear()
    callbacks.tell("train_begin", ARGS, state)
    assert callbacks.tell("log", ARGS, state, logs={}) == frozenset()


def test_callbacks_are_added_popped_and_removed_by_class_or_object() -> None:
    stops = StopsOnLog()
    callbacks = made(Idle, stops)
    assert callbacks.callback_list == "Idle\nStopsOnLog"
    assert callbacks.pop_callback(StopsOnLog) is stops
    assert callbacks.pop_callback(stops) is None
    callbacks.remove_callback(StopsOnLog)
    callbacks.add_callback(stops)
    callbacks.remove_callback(stops)
    assert callbacks.callback_list == "Idle"
    with pytest.raises(BadInput, match="Cannot remove this StopsOnLog"):
        callbacks.remove_callback(stops)


def test_a_second_callback_of_a_class_is_told_of_and_kept() -> None:
    callbacks = made(Idle)
    with pytest.warns(Notice, match="an? Idle among the callbacks already"):
        callbacks.add_callback(Idle)
    assert callbacks.callback_list == "Idle\nIdle"


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(BadType, match="A str is not a callback"):
        Callbacks([DefaultFlowCallback, "log"])


def test_an_error_in_a_callback_names_the_callback_and_the_event() -> None:
    class Breaks(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as raised:
        made(Breaks).tell("epoch_end", ARGS, TrainerState())
    assert str(raised.value) == "no\nRaised by the callback Breaks, on epoch_end."


def test_saved_callbacks_come_back_in_their_places_with_their_counts() -> None:
    stopper = EarlyStoppingCallback(early_stopping_patience=3)
    stopper.early_stopping_patience_counter = 2
    before = Callbacks([DefaultFlowCallback, stopper, Idle])
    before.control.should_epoch_stop = True
    stored = before.exported()
    assert set(stored) == {"EarlyStoppingCallback", "TrainerControl"}

    after = Callbacks([DefaultFlowCallback, EarlyStoppingCallback(), Idle])
    after.restore(stored)
    assert after.callback_list == before.callback_list
    assert after.callbacks[1].early_stopping_patience == 3
    assert after.callbacks[1].early_stopping_patience_counter == 2
    assert after.requests == {"stop_epoch"}


def test_a_saved_callback_that_this_run_lacks_is_told_of() -> None:
    stored = Callbacks([DefaultFlowCallback, EarlyStoppingCallback()]).exported()
    with pytest.warns(Notice, match="the state of EarlyStoppingCallback"):
        Callbacks([DefaultFlowCallback]).restore(stored)


def test_code_written_for_hfs_handler_can_call_events_by_name() -> None:
    callbacks = made(StopsOnLog)
    control = TrainerControl()
    assert callbacks.on_log(ARGS, TrainerState(), control, {"loss": 1.0}) is control
    assert control.should_training_stop
    assert callbacks.call_event("on_step_end", ARGS, TrainerState(), control) is control
    with pytest.raises(BadInput, match="no event 'on_coffee'"):
        callbacks.call_event("on_coffee", ARGS, TrainerState(), control)


def test_closing_leaves_the_users_own_callbacks_alone() -> None:
    class Holds(TrainerCallback):
        def close(self) -> None:
            raise AssertionError("the user's method, with the user's meaning")

    made(Idle, Holds).close()
