"""`anytrain launch` with real processes: what starts, what arrives, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from anytrain.machine.processes.heartbeat import read_beat
from launching import child_environment, free_port, run_command

ANYTRAIN = [sys.executable, "-m", "anytrain"]
TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
from anytrain.machine.strategies import table

how, folder = sys.argv[1], Path(sys.argv[2])
env = environment.read()
stall_s = float(env.wishes.stall_s.value) if env.wishes.stall_s else 60.0
world = torch_dist.join(
    env.place, "gloo", torch.device("cpu"), stall_s=stall_s, beats=env.beats
)
strategy = table.build("ddp" if world.size > 1 else "solo", world, torch.device("cpu"))
model = strategy.place(torch.nn.Linear(4, 4), {})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last = world.rank == world.size - 1
for step in range(1, 6):
    world.mark(step, "training")
    if step == 3 and last:
        watch = getattr(world, "_watch", None)  # one process alone is watched by none
        said = watch._count if watch else 0
        while how == "stop" and watch and watch._count < said + 3:
            time.sleep(0.05)  # until it has spoken of this line, not of torch's imports
        (folder / "struck").write_text(str(time.time()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raise":
            raise LookupError("the column is missing")
    if step == 3 and how == "hang":
        (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        if last:
            time.sleep(1000)
        world.barrier("waiting for the last rank")
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print(f"rank {world.rank} of {world.size} done", flush=True)
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def launch(*words, cwd, env=None, check=True):
    temporary = {"TMPDIR": str(cwd), **(env or {})}
    return run_command([*ANYTRAIN, "launch", *words], cwd=cwd, env=temporary, check=check)


def start(*words, cwd):
    return subprocess.Popen(
        [*ANYTRAIN, "launch", *map(str, words)],
        cwd=cwd,
        env=child_environment({"TMPDIR": str(cwd)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(*paths):
    until(lambda: all(path.exists() and path.read_text() for path in paths))


def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_killed_rank_ends_the_job_at_once_and_in_a_few_lines(train, tmp_path):
    ran = launch("--cpu", "-n", 2, train, "kill", tmp_path, cwd=tmp_path, check=False)
    # In a second or two; silence alone would end it after a minute.
    assert time.time() - float((tmp_path / "struck").read_text()) < 50
    assert ran.returncode == 128 + signal.SIGKILL
    assert len(ran.stderr.splitlines()) <= 12
    assert "Rank 1 of 2 (pid " in ran.stderr
    assert "was killed by SIGKILL at step 3 (training)." in ran.stderr
    assert "start the same command again" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("anytrain-*")), "the launcher's folder must go with it"


def test_a_stopped_rank_is_named_and_does_not_hold_the_launcher_up(train, tmp_path):
    words = ["--cpu", "-n", 2, "--stall_timeout", 3, train, "stop", tmp_path]
    ran = launch(*words, cwd=tmp_path, check=False)
    assert time.time() - float((tmp_path / "struck").read_text()) < 240
    assert ran.returncode != 0
    assert len(ran.stderr.splitlines()) <= 12
    assert "gave no sign of life for" in ran.stderr
    assert "it is stopped (SIGSTOP, or Ctrl-Z); it was at step 3 (training)" in ran.stderr
    assert "Its Python stack when it last spoke:\n" in ran.stderr
    assert f"    {train} line " in ran.stderr


def test_the_scripts_own_error_is_shown_once_and_then_explained(train, tmp_path):
    ran = launch("--cpu", "-n", 2, train, "raise", tmp_path, cwd=tmp_path, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert 'raise LookupError("the column is missing")' in ran.stderr
    last = ran.stderr.splitlines()[-3]
    assert last.startswith("anytrain: Rank 1 of 2 (pid ")
    assert last.endswith("failed with LookupError: the column is missing at step 3 (training).")


@pytest.mark.parametrize(("how", "code"), [("kill", 137), ("raise", 1)])
def test_a_single_process_gets_the_same_last_words(train, tmp_path, how, code):
    ran = launch("--cpu", "-n", 1, train, how, tmp_path, cwd=tmp_path, check=False)
    assert ran.returncode == code
    assert "anytrain: The script " in ran.stderr
    assert "at step 3 (training)." in ran.stderr


def test_ctrl_c_reaches_every_rank_and_leaves_nothing(train, tmp_path):
    job = start("--cpu", "-n", 2, train, "hang", tmp_path, cwd=tmp_path)
    files = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    wait_for(*files)
    (beats,) = tmp_path.glob("anytrain-*")
    until(lambda: read_beat(str(beats), 0).doing.startswith("barrier"))
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 130
    assert "Traceback" not in err
    assert "Stopped by Ctrl-C (SIGINT)." in err
    assert "Rank 0 was at step 3 (barrier 'waiting for the last rank')." in err
    assert not any(psutil.pid_exists(int(file.read_text())) for file in files)


def test_sigterm_ends_a_stopped_rank_too(train, tmp_path):
    job = start("--cpu", "-n", 1, train, "stop", tmp_path, cwd=tmp_path)
    wait_for(tmp_path / "struck")
    child = psutil.Process(job.pid).children()[0]
    until(lambda: child.status() == psutil.STATUS_STOPPED)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=240)
    assert job.returncode == 143
    assert not child.is_running()


REPORT = """
import json, os, sys
from pathlib import Path
from anytrain.core import environment
env = environment.read()
wishes = {n: getattr(env.wishes, n) for n in env.wishes.__slots__}
said = {
    "args": sys.argv[2:], "rank": env.place.rank, "size": env.place.size,
    "local_rank": env.place.local_rank, "debug": env.debug, "name": __name__,
    "threads": os.environ.get("OMP_NUM_THREADS"), "RANK": os.environ.get("RANK"),
    **{name: [w.value, w.source] for name, w in wishes.items() if w},
}
Path(sys.argv[1], f"said-{env.place.rank}.json").write_text(json.dumps(said))
"""


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.py"
    path.write_text(REPORT)
    return path


def said(folder, rank=0):
    return json.loads((folder / f"said-{rank}.json").read_text())


def test_arguments_arrive_as_they_were_typed(report, tmp_path):
    words = ["$HOME", "${local_rank}", "$$", "--num_processes", "9", "-n", "a b", "--", "-x"]
    launch("--cpu", "--num-processes", 2, report, tmp_path, *words, cwd=tmp_path)
    for rank in (0, 1):
        assert said(tmp_path, rank)["args"] == words
        assert said(tmp_path, rank)["size"] == 2
        assert said(tmp_path, rank)["local_rank"] == rank


def test_a_single_process_is_no_rank_of_anything(report, tmp_path):
    others = {"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
    step = {**others, "SLURM_STEP_ID": "0", "SLURM_LOCALID": "2"}
    launch("--cpu", "-n", 1, report, tmp_path, cwd=tmp_path, env=step)
    assert said(tmp_path)["size"] == 1
    assert said(tmp_path)["RANK"] is None


def test_the_command_line_beats_the_file_which_beats_the_environment(report, tmp_path):
    config = tmp_path / "hf.yaml"
    config.write_text(
        "mixed_precision: bf16\ngradient_accumulation_steps: 4\nuse_cpu: true\n"
        "num_processes: 1\nmain_training_function: train\n"
    )
    env = {"ACCELERATE_MIXED_PRECISION": "fp16", "ANYTRAIN_STALL_S": "7", "ANYTRAIN_DEVICE": "mps"}
    words = ["--config_file", config, "--gradient_accumulation_steps", 2, "--debug"]
    ran = launch(*words, report, tmp_path, cwd=tmp_path, env=env)
    got = said(tmp_path)
    assert got["accumulation"] == ["2", "launch option"]
    assert got["precision"] == ["bf16", "launch option"]
    assert got["device"] == ["cpu", "launch option"]
    assert got["stall_s"] == ["7", "environment variable ANYTRAIN_STALL_S"]
    assert got["debug"] is True
    assert f"anytrain: {config}: not used here: main_training_function." in ran.stderr


def test_several_processes_share_the_cores(report, tmp_path):
    env = {"OMP_NUM_THREADS": ""}
    words = ["--cpu", "-n", 2, "--num_cpu_threads_per_process", 3, report, tmp_path]
    launch(*words, cwd=tmp_path, env=env)
    assert said(tmp_path)["threads"] == "3"


def test_a_module_runs_by_its_name(report, tmp_path):
    launch("--cpu", "-n", 1, "--module", "report", tmp_path, cwd=tmp_path)
    assert said(tmp_path)["name"] == "__main__"


FLAKY = """
import os, sys, time
from pathlib import Path
folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
seen = folder / ("seen" + os.environ.get("RANK", ""))
if not seen.exists():
    seen.write_text("once")
    while len(list(folder.glob("seen*"))) < ranks:  # the first to leave ends the others
        time.sleep(0.02)
    sys.exit(5)
print("second time")
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_failed_job_is_started_again(tmp_path, num_processes):
    (tmp_path / "flaky.py").write_text(FLAKY)
    words = ["--cpu", "-n", num_processes, "--max_restarts", 1, "flaky.py"]
    ran = launch(*words, tmp_path, num_processes, cwd=tmp_path)
    assert ran.stdout.count("second time") == num_processes
    assert "left with exit code 5" in ran.stderr
    assert "Starting again; 0 more restart(s) after this one." in ran.stderr


def machines(port, rank, *words):
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    return ["--cpu", "--num_machines", 2, "--machine_rank", rank, *where, *words]


@pytest.mark.parametrize("how", ["well", "kill"])
def test_two_machines_meet_and_end_together(train, tmp_path, how):
    port = free_port()
    jobs = [
        start(*machines(port, rank, "-n", 2), train, how, tmp_path, cwd=tmp_path) for rank in (1, 0)
    ]
    (out1, err1), (out0, err0) = [job.communicate(timeout=240) for job in jobs]
    if how == "well":
        assert [job.returncode for job in jobs] == [0, 0], err0 + err1
        assert (out0, out1) == ("rank 0 of 2 done\n", "rank 1 of 2 done\n")
        assert (err0, err1) == ("", "")
        return
    assert jobs[0].returncode == 137
    assert "Rank 1 of 2 (pid " in err1
    assert jobs[1].returncode != 0
    assert "a rank on another machine died first" in err0
    assert len((err0 + err1).splitlines()) <= 12


def hears(pid, number):
    """Whether a process has a handler of its own for a signal."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    return int(caught, 16) >> (number - 1) & 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process hears")
def test_a_machine_that_waits_for_the_others_hears_ctrl_c(report, tmp_path):
    job = start(*machines(free_port(), 1, "-n", 2), report, tmp_path, cwd=tmp_path)
    until(lambda: hears(job.pid, signal.SIGTERM))  # as it does once it waits
    time.sleep(0.5)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 130
    assert "Traceback" not in err


def test_a_port_that_is_in_use_is_refused_before_anything_starts(report, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--cpu", "-n", 2, "--main_process_port", port, report, tmp_path]
        ran = launch(*words, cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert f"Cannot use port {port}." in ran.stderr
    assert "0 picks a free one" in ran.stderr
    assert not list(tmp_path.glob("said-*"))


def test_gpus_that_are_not_there_are_refused(report, tmp_path):
    ran = launch(
        "--multi_gpu", report, tmp_path, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}, check=False
    )
    assert ran.returncode == 2
    assert "Cannot use device 'cuda' (launch option)." in ran.stderr


def test_nothing_is_left_of_a_launcher_that_was_killed(train, tmp_path):
    job = start("--cpu", "-n", 2, train, "hang", tmp_path, cwd=tmp_path)
    files = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    wait_for(*files)
    os.kill(job.pid, signal.SIGKILL)
    _, err = job.communicate(timeout=240)
    wait_for_the_end_of(*files)
    # Whoever sees it first says so; the other may find that one gone first, and says nothing.
    assert re.search(r"anytrain: rank [01] ends: its launcher is gone\.", err)
    assert not list(tmp_path.glob("anytrain-*")), "its folder goes with the ranks"


PLAIN = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], "pid-" + os.environ.get("RANK", "0")).write_text(str(os.getpid()))
time.sleep(1000)  # where another script imports torch, or knows nothing of anytrain
"""
SAVES = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])

def save(number, frame):
    print("asked", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / f"saved-{os.environ.get('RANK', '0')}").write_text("whole")
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
from anytrain.machine.processes.heartbeat import Pulse
Pulse(int(os.environ.get("RANK", "0")), os.environ["ANYTRAIN_BEATS"]).mark(3, "training")
(folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
time.sleep(1000)
"""


def wait_for_the_end_of(*files):
    until(lambda: not any(psutil.pid_exists(int(file.read_text())) for file in files))


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")


@linux
@pytest.mark.parametrize("num_processes", [1, 2])
def test_ranks_that_never_met_end_with_a_launcher_that_was_killed(tmp_path, num_processes):
    (tmp_path / "plain.py").write_text(PLAIN)
    job = start("--cpu", "-n", num_processes, "plain.py", tmp_path, cwd=tmp_path)
    files = [tmp_path / f"pid-{rank}" for rank in range(num_processes)]
    wait_for(*files)
    job.kill()
    job.communicate(timeout=240)
    wait_for_the_end_of(*files)


@linux
def test_a_single_process_saves_when_its_launcher_was_killed(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    job = start("--cpu", "-n", 1, "saves.py", tmp_path, 0.5, cwd=tmp_path)
    wait_for(tmp_path / "pid-0")
    job.kill()
    job.communicate(timeout=240)
    wait_for_the_end_of(tmp_path / "pid-0")
    assert (tmp_path / "saved-0").read_text() == "whole"


@linux
def test_a_process_that_was_started_again_ends_with_its_launcher_too(tmp_path):
    (tmp_path / "fails_once.py").write_text(
        "import os, sys; from pathlib import Path\n"
        "if os.environ['RANK'] == '1' and not Path('failed').exists():\n"
        "    Path('failed').touch(); sys.exit(5)\n" + PLAIN
    )
    words = ["--cpu", "-n", 2, "--max_restarts", 1, "fails_once.py", tmp_path]
    job = start(*words, cwd=tmp_path)
    wait_for(tmp_path / "pid-1")
    job.kill()
    _, err = job.communicate(timeout=240)
    assert "Starting again" in err
    wait_for_the_end_of(tmp_path / "pid-1")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_that_arrives_twice_at_once_lets_the_ranks_save(tmp_path, num_processes):
    job = ask_twice(tmp_path, num_processes, gap_s=0.02, saves_for_s=3)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 143
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(num_processes))
    assert re.search(r"Stopped by SIGTERM\. (The script was|All ranks were) at step 3", err)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_second_request_ends_the_save_and_says_what_that_costs(tmp_path, num_processes):
    job = ask_twice(tmp_path, num_processes, gap_s=1.0, saves_for_s=1000)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 143
    assert not list(tmp_path.glob("saved-*"))
    assert "killed before it had ended by itself: what was not saved is lost. " in err


def ask_twice(folder, num_processes, gap_s, saves_for_s):
    """Start a job whose ranks take so long to save, and ask it to stop twice."""
    (folder / "saves.py").write_text(SAVES)
    job = start("--cpu", "-n", num_processes, "saves.py", folder, saves_for_s, cwd=folder)
    wait_for(*(folder / f"pid-{rank}" for rank in range(num_processes)))
    job.send_signal(signal.SIGTERM)
    time.sleep(gap_s)
    job.send_signal(signal.SIGTERM)
    return job
