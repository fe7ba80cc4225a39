"""Give a run the record of where its time goes, and of where it comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import psutil
import torch
from torch import nn

from anytrain._version import __version__
from anytrain.engine.assemble.session import Session
from anytrain.engine.recording import fingerprint
from anytrain.engine.recording.timesheet import Facts, Timesheet
from anytrain.machine.backends.cpu import cores_each, num_cores, processor


def timesheet(
    session: Session, folder: str | os.PathLike[str], *, begin: Facts, standing: Facts
) -> Timesheet:
    """Return a run's timesheet; what a session knows of itself is added to the door's facts."""
    return Timesheet(
        folder,
        session.ledger,
        begin=lambda: {**known(session), **begin()},
        standing=lambda: {**_standing(session), **standing()},
        rank=session.world.rank,
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


def start(session: Session, model: nn.Module | None, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written down of a run's start: plan, hardware, data, model."""
    return {
        "plan": known(session)["plan"],
        "hardware": _hardware(session),
        "data": {
            name: fingerprint.describe(found)
            for name, found in datasets.items()
            if found is not None
        },
        "model": None if model is None else _model(model),
    }


def _hardware(session: Session) -> dict[str, Any]:
    machine, is_host = session.machine, session.device.type == "cpu"
    return {
        "cpu": processor(),
        "num_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "backend": session.backend.name,
        "device": session.device.type,
        "device_name": None if machine is None else machine.name,
        "device_memory_bytes": None if machine is None or is_host else machine.memory_bytes,
        "num_devices": 1 if is_host else session.world.size,
        "num_processes": session.world.size,
    }


def _model(model: nn.Module) -> dict[str, Any]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    begun_from = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        "name": type(model).__name__,
        "from": begun_from or None,
        "num_parameters": sum(size for size, _ in sizes),
        "num_trainable": sum(size for size, is_trained in sizes if is_trained),
    }


def _standing(session: Session) -> Mapping[str, Any]:
    graphs, memory = session.graphs, session.backend.memory(session.device)
    compiled = {} if graphs is None else {"graphs": graphs.num_compiled, "late_shapes": graphs.late}
    return {
        **compiled,
        "used_bytes": memory.used_bytes,
        "peak_bytes": memory.peak_bytes,
        "revisions": [asdict(revision) for revision in session.revisions],
    }
