"""Whether the hub answers is found out quickly, and cached files do where it does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from anytrain.recipes.glue.network import cached_if_unreachable, is_reachable


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_who_listens_is_reachable_and_who_does_not_is_soon_known(listener: socket.socket) -> None:
    assert is_reachable(address(listener))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = address(gone)
    began = time.monotonic()
    assert not is_reachable(closed)
    assert not is_reachable("https://nowhere.invalid")
    assert time.monotonic() - began < 60


def test_a_proxy_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert is_reachable("https://elsewhere.invalid")


def test_an_unreachable_hub_leaves_cached_files(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    with cached_if_unreachable():
        assert constants.is_offline_mode()
        assert config.HF_HUB_OFFLINE
    assert not constants.is_offline_mode()
    assert not config.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", address(listener))
    with cached_if_unreachable():
        assert not constants.is_offline_mode()
