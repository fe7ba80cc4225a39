"""Read what wandb stored while it was offline.

Import it as `import offline_wandb`; tests/ is on the path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def records(file: Path) -> list[Any]:
    """Return the records of a run's offline file.

    The file is a leveldb log: 7 bytes of head, then 32 KiB blocks of (crc, length, kind, data).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
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
