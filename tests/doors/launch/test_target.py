from __future__ import annotations

import pytest

from anytrain.core.errors import BadInput, Notice
from anytrain.core.facts import Found, NotFound
from anytrain.core.plan import Choice, Wish, Wishes
from anytrain.doors.launch import target
from anytrain.doors.launch.target import choose_target, threads
from anytrain.machine.backends import probe


class Machine:
    """Stands in for a vendor that this host does not have."""

    def __init__(self, name, process_group, process_counts, answer=None):
        self.name, self.process_group = name, process_group
        self._counts, self._answer = process_counts, answer or Found("here", len(process_counts))

    def process_counts(self):
        return self._counts

    def probe(self):
        return self._answer


CUDA = Machine("cuda", "nccl", (1, 2, 3, 4))
MPS = Machine("mps", None, (1,))
TPU = Machine("tpu", "tpu_dist", (1, 4, 8))


@pytest.fixture
def host(monkeypatch):
    def have(machine):
        monkeypatch.setattr(probe, "choose", lambda wish: machine)

    return have


@pytest.mark.parametrize(("machine", "number"), [(CUDA, 4), (TPU, 8), (MPS, 1)])
def test_without_a_number_there_is_one_process_for_each_device(host, machine, number):
    host(machine)
    assert choose_target(Wishes(), None).num_processes == number


def test_a_cpu_gets_one_process_and_as_many_as_asked():
    cpu = Wishes(device=Wish("cpu", "test"))
    assert choose_target(cpu, None).num_processes == 1
    assert choose_target(cpu, 3).num_processes == 3


def test_more_processes_than_gpus_are_refused(host):
    host(CUDA)
    assert choose_target(Wishes(), 3).num_processes == 3
    with pytest.raises(BadInput, match="Cannot start 5 processes on 'cuda'") as caught:
        choose_target(Wishes(), 5)
    assert "1 to 4 processes" in caught.value.why


def test_a_number_that_a_tpu_cannot_be_cut_into_is_refused(host):
    host(TPU)
    with pytest.raises(BadInput) as caught:
        choose_target(Wishes(), 2)
    assert "1 or 4 or 8 processes" in caught.value.why


@pytest.mark.parametrize("machine", [CUDA, TPU])
def test_downcasting_is_refused_before_a_process_is_started(host, machine):
    host(machine)
    with pytest.raises(BadInput, match=f"Cannot use downcast_bf16 on '{machine.name}'"):
        choose_target(Wishes(downcast_bf16=Wish("True", "launch option")), None)
    host(Machine("xla", None, (1,)))
    assert (
        choose_target(Wishes(downcast_bf16=Wish("True", "launch option")), None).num_processes == 1
    )


def test_one_process_holds_all_devices_where_batches_are_split_over_them(host):
    host(Machine("xla", "xla", (1, 4)))
    spmd = Wishes(strategy=Wish("spmd", "launch option"))
    assert choose_target(spmd, None).num_processes == 1
    assert choose_target(Wishes(), None).num_processes == 4
    with pytest.raises(BadInput, match="Cannot start 4 processes with --strategy spmd"):
        choose_target(spmd, 4)


def test_chips_of_two_devices_are_told_of_their_strategy(host, monkeypatch):
    monkeypatch.setattr(target, "tpu_chips", lambda: ("TPU v2/v3",) * 4)
    host(Machine("xla", "xla", (1,)))
    with pytest.warns(Notice, match="--strategy spmd to split each batch over all devices"):
        assert choose_target(Wishes(), None).num_processes == 1
    with pytest.raises(BadInput) as caught:
        choose_target(Wishes(), 8)
    assert "--strategy spmd" in caught.value.fix
    assert choose_target(Wishes(strategy=Wish("spmd", "launch option")), None).num_processes == 1


def test_two_processes_on_mps_are_refused_with_the_way_out(host):
    host(MPS)
    with pytest.raises(BadInput) as caught:
        choose_target(Wishes(), 2)
    assert "gloo and nccl do not know it" in caught.value.why
    assert "anytrain launch --cpu --num_processes 2" in caught.value.fix


def test_a_tpu_is_whichever_engine_is_here(monkeypatch):
    missing = Machine("tpu", "tpu_dist", (1,), NotFound("no torch_tpu"))
    here = {"tpu": missing, "xla": Machine("xla", None, (1,))}
    monkeypatch.setattr(probe, "get", here.__getitem__)
    monkeypatch.setattr(probe, "choose", lambda wish: here[wish.value])
    assert choose_target(Wishes(device=Wish("tpu", "test")), None).backend.name == "xla"


def test_several_processes_share_the_cores_and_wait_without_burning_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(target, "usable_cores", lambda: Choice("8", "of this test"))
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert threads(1, None) == {}
    assert threads(1, 4) == {"OMP_NUM_THREADS": "4"}
    assert threads(3, None) == {"OMP_NUM_THREADS": "2", **passive}
    assert threads(16, None) == {"OMP_NUM_THREADS": "1", **passive}
    assert threads(3, 5) == {"OMP_NUM_THREADS": "5", **passive}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(3, None) == passive
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert threads(3, None) == {}
