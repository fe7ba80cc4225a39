"""Read what wandb stored while it was offline.

Import it as `import offline_wandb`; tests/ is on the path.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def records(file: Path, within_s: float = 240.0) -> list[Any]:
    """Return the records of a finished run's offline file.

    wandb's own process writes it, and on a busy machine its end comes after `finish()` returned.
    """
    last = time.monotonic() + within_s
    while True:
        found = _records(file)
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < last, "wandb has not written the end of the run"
        time.sleep(0.05)


def _records(file: Path) -> list[Any]:
    """Return the records that are there so far.

    The file is a leveldb log: 7 bytes of head, then 32 KiB blocks of (crc, length, kind, data).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            break  # it is being written
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Return the logged rows; a nested name is a path of keys."""
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in found
        if r.WhichOneof("record_type") == "history"
    ]
