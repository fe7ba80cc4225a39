"""A hub on this machine: it keeps the repositories and commits that it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any]]


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    revision: str
    token: str | None


@dataclass
class LocalHub:
    """What was sent; `refuses` turns everything away, a cleared `gate` holds commits back."""

    url: str = ""
    refuses: bool = False
    repositories: list[dict[str, Any]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: bytes, token: str | None) -> Answer:
        if self.refuses:
            return 403, {"error": "this hub refuses"}
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            paths = [found["path"] for found in json.loads(body)["files"]]
            return 200, {"files": [_regular(path) for path in paths]}
        if "/commit/" in path:
            return self.commit(path, body, token)
        return 404, {"error": path}

    def create(self, wanted: dict[str, Any]) -> Answer:
        self.repositories.append(wanted)
        owner = wanted.get("organization") or "me"
        return 200, {"url": f"{self.url}/{owner}/{wanted['name']}"}

    def commit(self, path: str, body: bytes, token: str | None) -> Answer:
        self.gate.wait(240)
        repository, revision = path.removeprefix("/api/models/").split("?")[0].split("/commit/")
        lines = [json.loads(line) for line in body.splitlines() if line]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        self.commits.append(Commit(summary, files, revision, token))
        oid = "a" * 40
        url = f"{self.url}/{repository}/commit/{oid}"
        return 200, {"commitUrl": url, "commitOid": oid, "success": True}


def _regular(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}


class _Server(ThreadingHTTPServer):
    hub: LocalHub


class _Requests(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply(*self.server.hub.answer(self.path, body, self.headers.get("Authorization")))

    def do_GET(self) -> None:
        self.reply(404, {"error": self.path})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[LocalHub]:
    """Give a hub that answers while the block runs."""
    server = _Server(("127.0.0.1", 0), _Requests)
    server.hub = hub = LocalHub(url=f"http://127.0.0.1:{server.server_port}")
    hub.gate.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(240)
