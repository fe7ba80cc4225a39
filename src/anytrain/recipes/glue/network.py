"""Find out quickly whether the hub can be reached, and load what is cached where it cannot.

The hub's libraries try again and again, for half a minute a file.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import getproxies

_SECONDS = 2.0


@contextmanager
def cached_if_unreachable() -> Iterator[None]:
    """Let the block look at cached files alone where the hub does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or is_reachable(constants.ENDPOINT):
        yield
        return
    configs: list[ModuleType] = [constants]
    try:
        from datasets import config
    except ImportError:
        pass  # only data sets need it
    else:
        configs.append(config)
    before = [vars(each)["HF_HUB_OFFLINE"] for each in configs]
    try:
        for each in configs:
            vars(each)["HF_HUB_OFFLINE"] = True
        yield
    finally:
        for each, value in zip(configs, before, strict=True):
            vars(each)["HF_HUB_OFFLINE"] = value


@lru_cache(maxsize=8)
def is_reachable(address: str, seconds: float = _SECONDS) -> bool:
    """Whether somebody answers there in time; through a proxy, nobody can tell so quickly."""
    place = urlsplit(address)
    if place.hostname is None or place.scheme in getproxies():
        return True
    host, port = place.hostname, place.port or (80 if place.scheme == "http" else 443)
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((host, port), seconds).close()
        except OSError:
            return
        answered.set()

    # In a thread, because a lookup of the name cannot be given a time limit.
    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    knocking.join(seconds)
    return answered.is_set()
