from __future__ import annotations

import sys

from launching import run_command, run_script

ANYTRAIN = [sys.executable, "-m", "anytrain", "test"]


def test_two_processes_talk_train_and_save():
    ran = run_command([*ANYTRAIN, "--cpu", "--num_processes", 2])
    lines = ran.stdout.splitlines()
    assert lines[0] == "2 process(es) on cpu, precision no, strategy ddp"
    assert [line[:4] for line in lines[1:-1]] == ["ok  "] * 3
    assert lines[-1] == "Everything works."


def test_a_check_that_fails_is_told_and_counted():
    script = """
    import sys
    from anytrain.cli import selftest
    def broken(accelerator):
        raise RuntimeError("the wire is cut")
    selftest._CHECKS = (("the wire", broken),)
    sys.exit(selftest.main())
    """
    ran = run_script(script, env={"ANYTRAIN_DEVICE": "cpu"}, check=False)
    assert ran.returncode == 1
    assert "FAIL  the wire" in ran.stdout
    assert "rank 0: RuntimeError: the wire is cut" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "1 check(s) failed."
