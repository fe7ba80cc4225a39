"""Laws that every backend obeys, run against each one that this host has."""

from __future__ import annotations

import pytest
import torch

from anytrain.core.errors import BadInput
from anytrain.core.facts import Found, JobFacts, NotFound
from anytrain.core.plan import Wish, Wishes, resolve
from anytrain.machine.backends import probe
from anytrain.machine.backends.base import Backend

ALL = [*probe.TABLE, *probe.BY_NAME_ONLY]


HERE = [name for name in ALL if isinstance(probe.get(name).probe(), Found)]


def _params() -> list[object]:
    others = [name for name in HERE if name != "cuda"]
    return [*others, pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_params())
def backend(request: pytest.FixtureRequest) -> Backend:
    return probe.get(request.param)


@pytest.fixture
def device(backend: Backend) -> torch.device:
    return backend.device(0)


@pytest.mark.parametrize("name", ALL)
def test_a_backend_that_the_laws_did_not_reach_says_why(name: str) -> None:
    answer = probe.get(name).probe()
    if isinstance(answer, NotFound):
        pytest.skip(f"{name}: {answer.because}")
    assert name in HERE


@pytest.mark.parametrize("name", ALL)
def test_a_probe_never_raises_and_always_gives_its_reason(name: str) -> None:
    backend = probe.get(name)
    answer = backend.probe()
    assert backend.name == name
    assert isinstance(answer, Found | NotFound)
    assert answer.because
    assert backend.probe() == answer


@pytest.mark.parametrize("name", ALL)
def test_every_backend_has_every_member_of_the_protocol(name: str) -> None:
    members = [m for m in vars(Backend) if not m.startswith("_")]
    assert [m for m in members if not hasattr(probe.get(name), m)] == []
    assert len(members) >= 17


def test_a_found_backend_has_devices_and_process_counts_that_grow(backend: Backend) -> None:
    answer = backend.probe()
    assert isinstance(answer, Found)
    counts = backend.process_counts()
    assert answer.num_devices >= 1
    assert counts == tuple(sorted(set(counts)))
    assert counts[0] >= 1
    if backend.process_group is None:
        assert counts == (1,)


def test_capabilities_are_true_of_the_device_and_stay_the_same(
    backend: Backend, device: torch.device
) -> None:
    facts = backend.capabilities(device)
    assert facts.backend == backend.name
    assert facts.device == str(device)
    assert facts.process_group == backend.process_group
    assert "float32" in facts.dtypes
    assert facts.name
    assert backend.capabilities(device) == facts
    for name in facts.dtypes:
        ones = torch.ones(3, 3, device=device, dtype=getattr(torch, name))
        assert (ones @ ones).cpu().tolist() == [[3.0] * 3] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_placing_keeps_values_shape_and_dtype(
    backend: Backend, device: torch.device, dtype: torch.dtype
) -> None:
    source = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    for non_blocking in (False, True):
        placed = backend.place(source, device, non_blocking)
        backend.synchronize(device)
        assert placed.device.type == device.type
        assert placed.dtype is dtype
        assert torch.equal(placed.cpu(), source)


def test_placing_float64_gives_a_dtype_that_the_device_has(
    backend: Backend, device: torch.device
) -> None:
    placed = backend.place(torch.tensor([0.5, 2.0], dtype=torch.float64), device, False)
    assert str(placed.dtype).removeprefix("torch.") in backend.capabilities(device).dtypes
    assert placed.cpu().tolist() == [0.5, 2.0]


def test_what_is_placed_already_is_not_copied(backend: Backend, device: torch.device) -> None:
    placed = backend.place(torch.ones(3), device, False)
    assert backend.place(placed, device, False) is placed


def test_a_restored_generator_repeats_its_draws(backend: Backend, device: torch.device) -> None:
    state = backend.rng_state(device)
    assert state is not None
    assert state.device.type == "cpu"
    first = torch.rand(8, device=device).cpu()
    second = torch.rand(8, device=device).cpu()
    backend.restore_rng(device, state)
    assert torch.equal(torch.rand(8, device=device).cpu(), first)
    assert torch.equal(torch.rand(8, device=device).cpu(), second)


def test_probing_capabilities_leaves_the_generator_alone(
    backend: Backend, device: torch.device
) -> None:
    before = backend.rng_state(device)
    backend.capabilities(device)
    after = backend.rng_state(device)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_memory_is_counted_within_the_total(backend: Backend, device: torch.device) -> None:
    use = backend.memory(device)
    if use.used_bytes is not None and use.total_bytes is not None:
        assert 0 <= use.used_bytes <= use.total_bytes
    if use.peak_bytes is not None and use.used_bytes is not None:
        assert use.peak_bytes >= use.used_bytes


def test_a_full_memory_is_recognised_and_other_errors_are_not(
    backend: Backend, device: torch.device
) -> None:
    if backend.name == "xla":
        pytest.skip("it takes memory when a graph runs; tests/xla fills it in a child process")
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert backend.is_out_of_memory(caught.value)
    assert not backend.is_out_of_memory(ValueError("no"))
    assert not backend.is_out_of_memory(RuntimeError("shapes do not match"))


def test_an_error_of_the_users_own_is_not_explained_away(backend: Backend) -> None:
    assert backend.explain(ValueError("mine")) is None
    assert backend.explain(RuntimeError("shapes do not match")) is None


def test_ending_a_step_waiting_and_releasing_are_always_allowed(
    backend: Backend, device: torch.device
) -> None:
    backend.end_step()
    backend.synchronize(device)
    backend.release()
    compiled = backend.compilations()
    assert compiled is None or compiled >= 0


def test_launch_variables_are_text_for_every_count(backend: Backend) -> None:
    for count in backend.process_counts()[:2]:
        for name, value in backend.launch_environment(count, Wishes()).items():
            assert isinstance(name, str)
            assert isinstance(value, str)


def test_a_second_process_is_planned_or_refused_by_the_process_group(
    backend: Backend, device: torch.device
) -> None:
    facts = backend.capabilities(device)
    assert resolve(Wishes(), facts, JobFacts(), 1).strategy.value == "solo"
    if backend.process_group is None:
        with pytest.raises(BadInput, match="2 processes"):
            resolve(Wishes(), facts, JobFacts(), 2)
    else:
        assert resolve(Wishes(), facts, JobFacts(), 2).strategy.value == "ddp"


def test_a_precision_is_granted_exactly_where_the_device_has_it(
    backend: Backend, device: torch.device
) -> None:
    facts = backend.capabilities(device)
    wishes = Wishes(precision=Wish("fp16", "argument"))
    if facts.scales_gradients and "float16" in facts.dtypes:
        assert resolve(wishes, facts, JobFacts(), 1).precision.value == "fp16"
    else:
        with pytest.raises(BadInput, match="fp16"):
            resolve(wishes, facts, JobFacts(), 1)


def test_what_was_sent_beside_the_computing_is_there_once_it_has_arrived(
    backend: Backend, device: torch.device
) -> None:
    lane = backend.lane(device)
    if lane is None:
        return
    sent = [torch.arange(9.0), torch.arange(8).view(2, 4).t(), torch.tensor(3), torch.zeros(0)]
    for _ in range(3):
        copies = [lane.send(tensor) for tensor in sent]
        lane.sent()()
        assert [copy.device for copy in copies] == [device] * 4
        assert all(
            torch.equal(copy.cpu(), tensor) for copy, tensor in zip(copies, sent, strict=True)
        )
    lane.sent()()  # of nothing
