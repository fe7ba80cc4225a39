"""Give a run the record of where its time goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from anytrain._version import __version__
from anytrain.engine.assemble.session import Session
from anytrain.engine.recording.timesheet import Facts, Timesheet
from anytrain.machine.backends.cores import cores_each


def timesheet(
    session: Session, folder: str | os.PathLike[str], *, begin: Facts, standing: Facts
) -> Timesheet:
    """Return a run's timesheet; what a session knows of itself is added to the door's facts."""
    return Timesheet(
        folder,
        session.ledger,
        begin=lambda: {**known(session), **begin()},
        standing=lambda: {**_standing(session), **standing()},
        is_main=session.world.rank == 0,
    )


def known(session: Session) -> Mapping[str, Any]:
    """Return what is known of a session when a run begins."""
    return {
        "plan": {name: asdict(choice) for name, choice in session.planned.reasons().items()},
        "device": str(session.device),
        "world_size": session.world.size,
        "num_cores": cores_each(session.environment.place.local_size),
        "versions": {"anytrain": __version__, "torch": str(torch.__version__)},
    }


def _standing(session: Session) -> Mapping[str, Any]:
    graphs = session.graphs
    compiled = {} if graphs is None else {"graphs": graphs.num_compiled, "late_shapes": graphs.late}
    return {
        **compiled,
        "peak_bytes": session.backend.memory(session.device).peak_bytes,
        "revisions": [asdict(revision) for revision in session.revisions],
    }
