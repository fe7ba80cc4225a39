"""A run's record knows what the run had, not what the machine has."""

from __future__ import annotations

import os

import pytest

from anytrain.core.plan import Wishes, wish
from anytrain.engine.assemble.session import session, session_facts


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="all cores are everybody's here")
def test_the_cores_on_record_are_those_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    run = session(Wishes(device=wish("cpu", "argument")))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert session_facts(run)["num_cores"] == 1
