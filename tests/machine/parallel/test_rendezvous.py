"""Ranks that wait for each other say for whom, and do not wait for one that cannot come."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import psutil
import pytest

from anytrain.machine.parallel import rendezvous
from launching import launch, run_anytrain, run_command

MEETS = """
import os, signal, sys
from pathlib import Path
rank, how = int(os.environ["RANK"]), sys.argv[1]
if rank == 1 and how == "ends":
    sys.exit(0)
if rank == 1 and how == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
import torch
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
env = environment.read()
torch_dist.join(env.place, "gloo", torch.device("cpu"), stall_s=1.5, beats=env.beats)
"""
# The rank that calls the roll leaves a file where it would write to the terminal.
TELLS = """
import os, sys, time, torch
from pathlib import Path
from anytrain.core import environment
from anytrain.machine.parallel import rendezvous, torch_dist

rank, told = int(os.environ["RANK"]), Path(sys.argv[1], "told")
ends = sys.argv[2] == "ends"

def say(text):
    if " for rank 2: " not in text:  # rank 1 is on its way, too
        return
    told.with_suffix(".new").write_text(text)
    told.with_suffix(".new").replace(told)
    if ends:
        os._exit(0)

rendezvous.say, rendezvous._AGAIN_S = say, 0.1
while rank == 2 and (ends or not told.exists()):
    time.sleep(0.01)
try:
    world = torch_dist.join(environment.read().place, "gloo", torch.device("cpu"), stall_s=1.5)
    print(world.gather_object(rank), flush=True)
except Exception as error:
    print(error, flush=True)
    raise
"""
LISTENS = """
import os, torch, psutil
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
torch_dist.join(environment.read().place, "gloo", torch.device("cpu"))
port = int(os.environ["MASTER_PORT"])
for each in psutil.Process().net_connections("tcp"):
    if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
        print(os.environ["RANK"], each.laddr.ip, flush=True)
"""
LAUNCHED = """
import os, psutil
for each in psutil.Process(os.getppid()).net_connections("tcp"):
    if each.status == psutil.CONN_LISTEN and str(each.laddr.port) == os.environ["MASTER_PORT"]:
        print(each.laddr.ip, flush=True)
"""


FAILS_ONCE = """
import os, signal, sys, torch
from pathlib import Path
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
env = environment.read()
world = torch_dist.join(env.place, "gloo", torch.device("cpu"))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
Path(sys.argv[1], f"{attempt}-{world.rank}").write_text(str(world.gather_object(world.rank)))
if attempt < 2:
    world.barrier("both have written")
    if world.rank == attempt:
        os._exit(3)
    world.barrier("the end")
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("how", "words"), [("ends", "has ended"), ("stops", "is stopped (SIGSTOP, or Ctrl-Z)")]
)
def test_a_launched_rank_that_cannot_come_is_named(tmp_path: Path, how: str, words: str) -> None:
    path = script(tmp_path, MEETS)
    ran = run_anytrain("launch", "--cpu", "-n", 2, path, how, check=False)
    assert ran.returncode == 1
    assert "anytrain: Rank 1 of 2 did not come to the meeting of the ranks" in ran.stderr
    assert f"{words}.\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_rank_that_waits_says_for_whom_and_waits_on(tmp_path: Path) -> None:
    ran = launch(TELLS, 3, tmp_path, "comes")
    assert ran.stdout == "[0, 1, 2]\n" * 3
    told = (tmp_path / "told").read_text()
    assert re.match(r"anytrain: rank 0 has waited \d+ s at 127\.0\.0\.1:", told)
    assert " for rank 2: rank 2 cannot be seen from here" in told


def test_a_meeting_that_loses_its_keeper_says_who_that_was(tmp_path: Path) -> None:
    ran = launch(TELLS, 3, tmp_path, "ends", check=False)
    assert "Rank 0 of 3 ended before all ranks had met." in ran.stdout


def test_ranks_that_torchrun_starts_again_meet_anew(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    path = script(tmp_path, FAILS_ONCE)
    met = tmp_path / "met"
    met.mkdir()
    run_command([sys.executable, *launcher, "--max-restarts", 2, path, met])
    said = {each.name: each.read_text() for each in met.iterdir()}
    assert said == {f"{attempt}-{rank}": "[0, 1]" for attempt in range(3) for rank in (0, 1)}


def test_a_meeting_of_one_machine_is_out_of_reach_of_others(tmp_path: Path) -> None:
    assert launch(LISTENS, 2).stdout == "0 127.0.0.1\n"
    ran = run_anytrain("launch", "--cpu", "-n", 2, script(tmp_path, LAUNCHED))
    assert ran.stdout == "127.0.0.1\n" * 2


@pytest.mark.parametrize(("address", "bound"), [("localhost", "127.0.0.1"), ("0.0.0.0", None)])
def test_a_store_listens_where_its_ranks_are(address: str, bound: str | None) -> None:
    store = rendezvous.listening_store(address, 0, 5.0)
    connections = psutil.Process().net_connections("tcp")
    listening = [c.laddr.ip for c in connections if c.laddr.port == store.port and not c.raddr]
    assert listening == [bound or "::"] or (bound is None and listening == ["0.0.0.0"])
    with socket.create_connection(("127.0.0.1", store.port), 5):
        store.set("a", "b")
    assert store.get("a") == b"b"
