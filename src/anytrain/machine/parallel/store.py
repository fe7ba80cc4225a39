"""The side channels of a job: small messages through the store that the ranks met at.

Each channel has a connection of its own, because a store's connection answers one call at a
time: a beat must not wait for a main thread that waits for its peers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store


class StoreBoard:
    """A Board, and a Wire for beats, over the process group's store."""

    def __init__(self, channel: str) -> None:
        connection = _get_default_store().clone()  # type: ignore[attr-defined]  # not in stubs
        self._store = PrefixStore(f"anytrain/{channel}", connection)
        self._seen: set[str] = set()

    def post(self, key: str, value: str) -> None:
        """Publish a value for every rank to read."""
        self._store.set(key, value)

    def read(self, key: str) -> str | None:
        """Return what was posted under the key, or None; never wait for it."""
        return self._store.get(key).decode() if self._is_there(key) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return what was posted under each key, in one round trip once all are known."""
        there = [key for key in keys if self._is_there(key)]
        if not self._store.has_extended_api():  # type: ignore[attr-defined]  # not in stubs
            return [self.read(key) for key in keys]
        values = self._store.multi_get(there) if there else []
        found = {key: value.decode() for key, value in zip(there, values, strict=True)}
        return [found.get(key) for key in keys]

    def _is_there(self, key: str) -> bool:
        """Whether the key was ever posted; `get` on one that was not would wait."""
        if key not in self._seen and self._store.check([key]):
            self._seen.add(key)
        return key in self._seen
