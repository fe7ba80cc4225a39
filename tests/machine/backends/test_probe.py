from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken
from anytrain.core.facts import Capabilities, Found, JobFacts, NotFound
from anytrain.core.plan import Wish, Wishes, resolve
from anytrain.machine.backends import probe

Answer = Found | NotFound
ABSENT = NotFound("not here")


@dataclass(frozen=True)
class StandIn:
    """A backend that only answers the probe."""

    index: int | None
    name: str
    answer: Answer

    def probe(self) -> Answer:
        return self.answer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the table's probes answer as if on another host."""

    def become(**answers: Answer) -> None:
        answers = {"cpu": Found("2 cores", 1), **answers}
        module = types.ModuleType("stand_in_backends")
        for name in probe.TABLE:
            answer = answers.get(name, ABSENT)
            setattr(module, name, lambda i, n=name, a=answer: StandIn(i, n, a))
        monkeypatch.setitem(sys.modules, "stand_in_backends", module)
        monkeypatch.setattr(probe, "TABLE", {n: f"stand_in_backends:{n}" for n in probe.TABLE})

    return become


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("cuda", ("cuda", None)),
        ("cuda:1", ("cuda", 1)),
        ("GPU:0", ("cuda", 0)),
        (" cpu ", ("cpu", None)),
        ("fake", ("fake", None)),
    ],
)
def test_a_device_is_split_into_name_and_number(text: str, meant: tuple[str, int | None]) -> None:
    assert probe.parse_device(text) == meant


@pytest.mark.parametrize("text", ["cudda", "", "cuda:", "cuda:x", "cuda:-1", "gpu:1:2", "ipu"])
def test_an_unknown_device_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(BadInput, match="tpu, xla, cuda, mps, cpu, fake"):
        probe.parse_device(text)
    with pytest.raises(BadInput):
        probe.get(text)


def test_the_table_names_each_backend_once_in_order_of_preference() -> None:
    assert [*probe.TABLE] == ["tpu", "xla", "cuda", "mps", "cpu"]
    assert [probe.get(name).name for name in probe.TABLE] == [*probe.TABLE]


def test_without_a_wish_the_first_found_in_order_is_taken(host: Callable[..., None]) -> None:
    gpu, mac, tpu = Found("a GPU", 2), Found("a Mac", 1), Found("a TPU", 4)
    host()
    assert probe.choose(None).name == "cpu"
    host(mps=mac)
    assert probe.choose(None).name == "mps"
    host(mps=mac, cuda=gpu)
    assert probe.choose(None).name == "cuda"
    host(mps=mac, cuda=gpu, tpu=tpu)
    assert probe.choose(None).name == "tpu"
    host(cuda=gpu, xla=Found("xla on TPU", 4))
    assert probe.choose(None).name == "xla"


def test_xla_without_a_tpu_is_taken_only_when_asked_for(host: Callable[..., None]) -> None:
    host(xla=Found("xla on CPU", 1, automatic=False))
    assert probe.choose(None).name == "cpu"
    assert probe.choose(Wish("xla", "argument")).name == "xla"


def test_an_argument_beats_the_environment_which_beats_the_automatic_choice(
    host: Callable[..., None],
) -> None:
    host(cuda=Found("a GPU", 2), mps=Found("a Mac", 1))
    exported = environment.read({"ANYTRAIN_DEVICE": "mps"}).wishes
    argument = Wishes(device=Wish("cpu", "argument"))
    assert probe.choose(exported.device).name == "mps"
    assert probe.choose(argument.over(exported).device).name == "cpu"
    assert probe.choose(Wishes().over(exported).device).name == "mps"


def test_a_broken_accelerator_is_never_replaced_by_the_cpu_without_a_word(
    host: Callable[..., None],
) -> None:
    host(cuda=NotFound("an H100 is here, but the driver is old", True, "update the driver"))
    with pytest.raises(DeviceBroken) as caught:
        probe.choose(None)
    assert "an H100 is here, but the driver is old" in str(caught.value)
    assert "update the driver" in caught.value.fix
    assert "ANYTRAIN_DEVICE=cpu" in caught.value.fix
    assert "cpu=True" in caught.value.fix
    assert probe.choose(Wish("cpu", "argument")).name == "cpu"


def test_a_broken_accelerator_does_not_stand_in_the_way_of_a_better_one(
    host: Callable[..., None],
) -> None:
    host(tpu=Found("a TPU", 4), cuda=NotFound("broken", broken=True))
    assert probe.choose(None).name == "tpu"


def test_asking_for_a_broken_accelerator_says_what_failed(host: Callable[..., None]) -> None:
    host(mps=NotFound("macOS 12.2 is too old", broken=True))
    with pytest.raises(DeviceBroken, match="macOS 12.2 is too old"):
        probe.choose(Wish("mps", "argument"))


def test_asking_for_an_absent_device_says_what_was_found(host: Callable[..., None]) -> None:
    host(mps=Found("a Mac", 1))
    with pytest.raises(BadInput) as caught:
        probe.choose(Wish("cuda", "environment variable ANYTRAIN_DEVICE"))
    assert "environment variable ANYTRAIN_DEVICE" in str(caught.value)
    assert "found here: mps, cpu" in str(caught.value)


def test_a_device_number_must_exist_and_is_handed_to_the_backend(
    host: Callable[..., None],
) -> None:
    host(cuda=Found("two GPUs", 2))
    chosen = probe.choose(Wish("cuda:1", "argument"))
    assert isinstance(chosen, StandIn)
    assert chosen.index == 1
    with pytest.raises(BadInput, match=r"2 device\(s\)"):
        probe.choose(Wish("cuda:2", "argument"))


def test_the_survey_answers_for_every_backend_but_the_fake_one(host: Callable[..., None]) -> None:
    host(cuda=Found("a GPU", 1))
    told = probe.survey()
    assert [each.name for each in told] == ["tpu", "xla", "cuda", "mps", "cpu"]
    assert [each.name for each in told if isinstance(each.answer, Found)] == ["cuda", "cpu"]


def test_the_fake_device_is_found_by_name_alone() -> None:
    assert probe.choose(None).name != "fake"
    chosen = probe.choose(environment.read({"ANYTRAIN_DEVICE": "fake"}).wishes.device)
    assert chosen.name == "fake"
    assert chosen.device(0).type == "cpu"


def test_two_processes_on_mps_are_refused_with_the_way_out() -> None:
    mac = Capabilities("mps", "mps:0", "Apple M2", ("float32",))
    with pytest.raises(BadInput) as caught:
        resolve(Wishes(), mac, JobFacts(), 2)
    assert "gloo and nccl" in caught.value.why
    assert "--cpu --num_processes 2" in caught.value.fix
