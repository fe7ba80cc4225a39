"""The side channels of a job: small messages through the store that the ranks met at.

Each channel has a connection of its own, because a store's connection answers one call at a
time: a beat must not wait for a main thread that waits for its peers. It is opened by the first
message, because opening one asks the system for host names, which can take seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store


class StoreBoard:
    """A Board, and a Wire for beats, over the process group's store."""

    def __init__(self, channel: str) -> None:
        self._prefix = f"anytrain/{channel}"
        self._group_store = _get_default_store()
        self._connection: PrefixStore | None = None
        self._opening = threading.Lock()
        self._seen: set[str] = set()

    def post(self, key: str, value: str) -> None:
        """Publish a value for every rank to read; it can be read when this returns."""
        store = self._store()
        store.set(key, value)
        # Setting waits for no answer: a peer could come and ask before the store has heard.
        store.check([key])

    def read(self, key: str) -> str | None:
        """Return what was posted under the key, or None; never wait for it."""
        return self._store().get(key).decode() if self._is_there(key) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return what was posted under each key, in one round trip once all are known."""
        store = self._store()
        if not store.has_extended_api():  # type: ignore[attr-defined]  # not in stubs
            return [self.read(key) for key in keys]
        there = [key for key in keys if self._is_there(key)]
        values = store.multi_get(there) if there else []
        found = {key: value.decode() for key, value in zip(there, values, strict=True)}
        return [found.get(key) for key in keys]

    def _is_there(self, key: str) -> bool:
        """Whether the key was ever posted; `get` on one that was not would wait."""
        if key not in self._seen and self._store().check([key]):
            self._seen.add(key)
        return key in self._seen

    def _store(self) -> PrefixStore:
        with self._opening:
            if self._connection is None:
                own = self._group_store.clone()  # type: ignore[attr-defined]  # not in stubs
                self._connection = PrefixStore(self._prefix, own)
        return self._connection
