from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import anytrain
from anytrain.cli.main import app
from anytrain.doors.launch import elastic
from launching import child_environment, run_command, run_script

ANYTRAIN = [sys.executable, "-m", "anytrain"]
COMMANDS = (
    "launch",
    "env",
    "config",
    "test",
    "glue",
    "demo",
    "why",
    "report",
    "diff",
    "watch",
    "checkpoint",
    "verify-resume",
    "preflight",
    "parity",
    "bench",
)


def test_the_version_is_the_packages():
    assert run_command([*ANYTRAIN, "--version"]).stdout == f"anytrain {anytrain.__version__}\n"


def test_help_names_every_command():
    told = run_command([*ANYTRAIN, "--help"]).stdout
    listed = [line.split()[0] for line in told.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == list(COMMANDS)


def test_help_takes_little_more_processor_time_than_the_library_that_prints_it():
    """Together less than a third of a second; a fixed number would judge the host."""

    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def least(*command):
        spent = []
        for _ in range(3):
            before = used()
            run_command(command, fresh=True)
            spent.append(used() - before)
        return min(spent)

    assert least(*ANYTRAIN, "--help") < 2 * least(sys.executable, "-c", "import typer")


@pytest.mark.parametrize("words", [["--help"], *([c, "--help"] for c in COMMANDS)])
def test_help_loads_no_library_that_takes_long(words):
    script = f"""
    import sys
    from anytrain.cli.main import run
    sys.argv = ["anytrain", *{words!r}]
    try:
        run()
    finally:
        assert not {{"torch", "transformers"}} & set(sys.modules)
    """
    run_script(script)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(name):
    told = run_command([*ANYTRAIN, name, "--help"]).stdout
    assert told.lstrip().startswith(f"Usage: anytrain {name}")


def test_our_errors_are_printed_as_their_text_with_exit_code_two():
    ran = run_command([*ANYTRAIN, "launch", "absent.py"], check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("anytrain: There is no script absent.py.\n  why: ")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback(how):
    words = ["--debug"] if how == "option" else []
    env = {"ANYTRAIN_DEBUG": "1"} if how == "variable" else {}
    ran = run_command([*ANYTRAIN, *words, "launch", "absent.py"], env=env, check=False)
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr


def test_an_unknown_command_is_refused():
    ran = run_command([*ANYTRAIN, "fly"], check=False)
    assert ran.returncode == 2
    assert "No such command" in ran.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("lanch x.py", "No such command 'lanch'. Did you mean 'launch'?"),
        ("benchmark", "Did you mean 'bench'?"),
        ("version", "Did you mean '--version'?"),
        ("xyzzy", "No such command 'xyzzy'.\n"),
        ("checkpoint lst", "Did you mean 'list'?"),
        ("--versoin", "Did you mean --version?"),
        ("launch --num_process 2 x.py", "Did you mean --num_processes?"),
        ("launch --nproc_per_node=2 x.py", "Did you mean --num_processes?"),
        ("env --jsn", "Did you mean --json?"),
        ("demo --num_train_epochs 1", "Did you mean --epochs?"),
        ("bench glue --lr 1", "Did you mean --learning_rate?"),
        ("test --xyzzy", "No such option --xyzzy.\n"),
        ("launch -n two x.py", "not a whole number.\n"),
        ("demo --epochs 0", "'--epochs': must be at least 1.\n"),
        ("preflight --fail-on foo x.py", "'--fail-on': 'foo' is not one of 'error', 'warning'.\n"),
        ("env extra", "Error: Unexpected: extra.\n"),
    ],
)
def test_a_wrong_word_is_told_with_the_one_that_was_meant(words, told):
    ran = CliRunner().invoke(app, words.split())
    assert ran.exit_code == 2
    assert told in ran.output and ran.output.count("Did you mean") <= 1


def test_ctrl_c_is_quiet():
    script = """
    import sys
    from anytrain.cli import config, main
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
    config.check = interrupted
    sys.argv = ["anytrain", "config", "--default", "--output", "x.yaml"]
    main.run()
    """
    ran = run_script(script, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_a_reader_that_leaves_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [*ANYTRAIN, "launch", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
        check=False,
    )
    os.close(writing)
    assert "Traceback" not in ran.stderr


INNER = [["checkpoint", c] for c in ("list", "show", "verify", "prune")]
INNER += [["bench", c] for c in ("glue", "script")]


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), *INNER], ids=" ".join)
def test_a_short_h_asks_for_help_everywhere(words):
    short, long = (CliRunner().invoke(app, [*words, word]) for word in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output and short.output.lstrip().startswith("Usage: ")


def test_a_scripts_own_h_is_the_scripts(monkeypatch):
    given = []
    monkeypatch.setattr(elastic, "launch", lambda asked, *rest: given.extend(rest) or 0)
    assert CliRunner().invoke(app, ["launch", "own.py", "-h"]).exit_code == 0
    assert given == ["own.py", ["-h"]]


def test_completion_is_offered_at_the_top():
    told = CliRunner().invoke(app, ["--help"]).output
    assert "--install-completion" in told and "--show-completion" in told
    asked = {"_ANYTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "anytrain wa", "COMP_CWORD": "1"}
    assert run_command(ANYTRAIN, env=asked).stdout.split() == ["watch"]
    below = CliRunner().invoke(app, ["checkpoint", "--help"]).output
    assert "--install-completion" not in below


@pytest.mark.parametrize("words", [[], ["checkpoint"], ["bench"]], ids=" ".join)
def test_a_list_of_commands_cuts_no_sentence(words):
    assert "..." not in CliRunner().invoke(app, [*words, "-h"]).output.split("Commands:")[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("watch own.py", "own.py is a file."),
        ("why own.py", "own.py is a file."),
        ("checkpoint show own.py", "it is a file."),
        ("launch folder", "there is no __main__.py in it."),
        ("checkpoint show", "`anytrain checkpoint show PATH`"),
        ("diff", "`anytrain diff PATH PATH`"),
    ],
)
def test_a_path_of_the_wrong_kind_is_told_as_what_it_is(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "folder").mkdir()
    ran = CliRunner().invoke(app, words.split())
    assert ran.exit_code == 2
    assert told in ran.output
