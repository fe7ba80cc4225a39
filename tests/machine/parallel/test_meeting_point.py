from __future__ import annotations

import pytest

from anytrain.core.errors import BadInput
from anytrain.machine.parallel.rendezvous import meeting_point, store_holder


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu[01-04]", "gpu01"),
        ("gpu[3,5-7],cpu1", "gpu3"),
        ("a1,b2", "a1"),
        ("rack-2-node[10-11]", "rack-2-node10"),
        ("node[1-2].cluster", "node1.cluster"),
    ],
)
def test_srun_ranks_meet_on_the_first_node_of_the_step(nodes, first):
    env = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "7"}
    assert meeting_point("srun", env) == (first, 20007)


def test_two_steps_of_one_job_do_not_meet():
    ports = {
        meeting_point("srun", {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": s})
        for s in ("0", "1", "2")
    }
    assert len(ports) == 3


def test_what_the_user_exported_wins():
    env = {"MASTER_ADDR": "here", "MASTER_PORT": "1234", "SLURM_STEP_NODELIST": "there"}
    assert meeting_point("srun", env) == ("here", 1234)


@pytest.mark.parametrize(
    ("launcher", "env"),
    [
        ("srun", {}),
        ("torchrun", {"MASTER_ADDR": "here"}),
        ("torchrun", {"MASTER_ADDR": "here", "MASTER_PORT": "many"}),
    ],
)
def test_ranks_that_cannot_know_where_to_meet_are_told_so(launcher, env):
    with pytest.raises(BadInput):
        meeting_point(launcher, env)


def test_rank_zero_holds_the_store_unless_an_agent_does():
    assert store_holder({}) == 0
    assert store_holder({"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None


@pytest.mark.parametrize("port", ["65536", "9" * 5000, "-1", "²"])
def test_a_port_that_there_is_not_is_refused_in_few_words(port):
    with pytest.raises(BadInput, match="Cannot read MASTER_PORT=") as told:
        meeting_point("torchrun", {"MASTER_ADDR": "here", "MASTER_PORT": port})
    assert len(str(told.value)) < 300
