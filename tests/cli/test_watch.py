"""`anytrain watch` on real runs, as a person meets it."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from launching import child_environment, run_command, script_file
from slow_training import TRAINING

WATCH = (sys.executable, "-m", "anytrain", "watch")
NOT_FOUND = "import sys; sys.modules['torch'] = None; from anytrain.cli.main import run; run()"


@pytest.fixture(scope="module")
def script() -> Iterator[Path]:
    with script_file(TRAINING) as path:
        yield path


def start(*command: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in command],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,  # type: ignore[call-overload]
    )


@dataclass
class Endless:
    """A run that goes on until it is killed."""

    folder: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def run(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endless]:
    """A run that goes on for as long as the tests here, which share it."""
    folder = tmp_path_factory.mktemp("runs") / "endless"
    training = start(sys.executable, script, folder, 1_000_000)
    try:
        until = time.monotonic() + 240
        while _text(folder / "metrics.jsonl").count('"loss"') < 3:  # a pace takes two
            assert training.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        yield Endless(folder, training)
    finally:
        training.kill()
        training.wait()


@pytest.fixture
def endless(run: Endless) -> Iterator[Path]:
    """The folder of a run that no watcher may disturb."""
    yield run.folder
    assert run.process.poll() is None, "a watcher has touched the run"


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_a_pipe_gets_lines_from_before_the_run_begins_to_its_end(
    script: Path, tmp_path: Path
) -> None:
    watching = start(*WATCH, tmp_path / "run")
    assert watching.stdout is not None
    first = watching.stdout.readline()
    run_command([sys.executable, script, tmp_path / "run", 60])
    out, _ = watching.communicate(timeout=240)
    assert watching.returncode == 0
    assert "\x1b" not in first + out
    lines = out.splitlines()
    assert first.startswith("Waiting for the record of a run in ")
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/60 ", line))]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    assert "Training done" in lines
    assert any(re.fullmatch(r"  results +.*run", line) for line in lines)


def test_once_prints_how_a_run_stands_without_torch(endless: Path) -> None:
    words = [sys.executable, "-c", NOT_FOUND, "watch", endless, "--once"]
    said = run_command(words).stdout.splitlines()
    assert re.match(r"endless: running; process \d+, last heard \d:\d\d ago", said[0])
    assert re.match(r"training .* \d+/1000000 +0%  \d+:\d\d", said[1])
    assert "loss 0." in said[2] and "samples/s" in said[2]
    assert re.match(r"time  \w+ \d+%", said[3])


def test_it_leaves_when_nobody_reads_its_lines_any_more(endless: Path) -> None:
    watching = start(*WATCH, endless)
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.stdout.close()
    assert watching.wait(timeout=240) == 0


def test_once_refuses_a_folder_without_a_record(tmp_path: Path) -> None:
    done = run_command([*WATCH, tmp_path, "--once"], check=False)
    assert done.returncode == 2
    assert "There is no record of a run" in done.stderr


def read_until(terminal: int, is_enough: Callable[[str], bool], seconds: float = 240.0) -> str:
    """Read what a terminal is sent until it is enough, or for so long."""
    seen, until = "", time.monotonic() + seconds
    while not is_enough(seen) and (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                seen += os.read(terminal, 2**16).decode(errors="replace")
            except OSError:  # nobody writes to it any more
                break
    return seen


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_terminal_it_draws_bars_and_q_leaves_it_in_order(endless: Path) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    before = termios.tcgetattr(theirs)
    env = {**child_environment(), "TERM": "xterm"}
    command = [*WATCH, str(endless)]
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    try:
        drawn = read_until(ours, lambda seen: seen.count("training ") >= 3)
        os.write(ours, b"q")
        assert watching.wait(timeout=240) == 0
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            while True:
                drawn += os.read(ours, 2**16).decode(errors="replace")
        assert "━" in drawn or "╌" in drawn
        assert "loss" in drawn and "time  " in drawn and "samples/s" in drawn
        assert drawn.endswith("\r\x1b[J")  # nothing is left below the cursor
        assert termios.tcgetattr(theirs)[:4] == before[:4]
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("options", [[], ["--web"]], ids=["terminal", "web"])
def test_a_request_to_end_leaves_the_terminal_in_order(endless: Path, options: list[str]) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    env = {**child_environment(), "TERM": "xterm"}
    command = [*WATCH, str(endless), *options]
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    try:
        shown = "token=" if options else "training "
        assert shown in read_until(ours, lambda seen: shown in seen)
        assert termios.tcgetattr(theirs)[3] != before[3]
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(timeout=240) == 128 + signal.SIGTERM
        assert termios.tcgetattr(theirs)[:4] == before[:4]
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no jobs")
def test_a_job_in_the_background_is_not_stopped_for_the_keyboard(
    endless: Path, tmp_path: Path
) -> None:
    import pty

    command = " ".join(shlex.quote(word) for word in [*WATCH, str(endless), "--web"])
    script = tmp_path / "job.sh"
    log = tmp_path / "log"
    script.write_text(
        f"set -m\n{command} > {log} 2>&1 &\n"
        f"for n in $(seq 2400); do grep -q token= {log} && break; "
        '[ -n "$(jobs -s)" ] && break; sleep 0.1; done\n'
        'echo "stopped: [$(jobs -s)] said: [$(grep -c token= ' + str(log) + ')]"\n'
        "kill %1; kill -CONT %1; wait\necho over\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", str(script)], child_environment())
    try:
        said = read_until(terminal, lambda seen: "over" in seen)
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert "stopped: [] said: [1]" in said


@pytest.mark.parametrize(
    "options", [["--once", "--web"], ["--once", "--port", "0"], ["--open"], ["--port", "8000"]]
)
def test_options_that_mean_nothing_together_are_refused(tmp_path: Path, options: list[str]) -> None:
    done = CliRunner().invoke(app, ["watch", str(tmp_path), *options])
    assert done.exit_code == 2 and "Cannot use --" in done.output


def test_the_page_s_address_is_printed_and_ctrl_c_ends_it_without_a_complaint(
    endless: Path,
) -> None:
    serving = start(*WATCH, endless, "--web", start_new_session=True)
    try:
        assert serving.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", serving.stdout.readline())
        assert address is not None
        with urlopen(address[0], timeout=240) as answer:
            assert b"endless" in answer.read()
        serving.send_signal(signal.SIGINT)
        out, _ = serving.communicate(timeout=240)
        assert serving.returncode == 0
        assert "Traceback" not in out and "http://" not in out
    finally:
        serving.kill()
        serving.wait()


def test_a_run_that_is_killed_is_said_to_be_killed(run: Endless) -> None:
    watching = start(*WATCH, run.folder, "--wait", "0")
    assert watching.stdout is not None
    for line in watching.stdout:
        if line.startswith("step "):
            break
    run.process.kill()
    run.process.wait()
    rest = watching.stdout.read()
    assert watching.wait(timeout=240) == 1
    assert re.search(r"^The run was killed after step \d+; last heard", rest, re.MULTILINE)
    done = run_command([*WATCH, run.folder, "--once"], check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("endless: The run was killed after step ")
