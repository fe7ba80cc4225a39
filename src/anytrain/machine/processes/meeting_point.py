"""Find out where the ranks of a job meet, and who keeps the meeting point."""

from __future__ import annotations

import ipaddress
import os
import re
import reprlib
from collections.abc import Mapping

from anytrain.core.errors import BadInput


def meeting_point(launcher: str, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return the address and port where rank 0 listens.

    MASTER_ADDR and MASTER_PORT say it; an srun step can do without them.

    >>> meeting_point("srun", {"SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "41"})
    ('gpu07', 20041)
    """
    env = os.environ if environ is None else environ
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if launcher != "srun" and not (address and port):
        raise BadInput(
            "Cannot tell where the ranks of this job meet.",
            why="RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not.",
            fix="start the job with `anytrain launch` or torchrun, or export both.",
        )
    return address or _first_host(env), _number(port, "MASTER_PORT") if port else _port(env)


def store_holder(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank whose process holds the store; None where a launcher holds it."""
    env = os.environ if environ is None else environ
    return None if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def loopback(address: str) -> str | None:
    """Return the number of an address that only this machine reaches; None for any other.

    A host's own name is none: other machines may find this one by it.

    >>> loopback("localhost"), loopback("127.0.0.1"), loopback("10.0.0.7"), loopback("gpu07")
    ('127.0.0.1', '127.0.0.1', None, None)
    """
    if address.lower() == "localhost":
        return "127.0.0.1"
    try:
        return address if ipaddress.ip_address(address).is_loopback else None
    except ValueError:
        return None


def _first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise BadInput(
            "Cannot tell where the ranks of this job meet.",
            why="MASTER_ADDR, SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are all unset.",
            fix="export MASTER_ADDR with the name of the first node.",
        )
    prefix, number, suffix = found.groups()
    return prefix + (number or "") + (suffix or "")


def _port(env: Mapping[str, str]) -> int:
    """Return a port of this step's own, so that two jobs on one node do not meet."""
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    mixed = (int(job) if job.isdigit() else 0) + 97 * (int(step) if step.isdigit() else 0)
    return 20000 + mixed % 12000


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise BadInput(
            f"Cannot read {name}={reprlib.repr(text)}.",
            why="it must be a port number, up to 65535.",
            fix=f"export {name} with a free port, such as 29500.",
        )
    return int(text)
