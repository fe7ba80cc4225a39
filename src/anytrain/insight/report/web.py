"""Serve a run as a page that follows it, on this machine alone.

The server listens on 127.0.0.1 and answers nobody who lacks the token in the page's address; a
name other than this machine's own in `Host` is refused, so that no foreign page can reach it by
a name that points here. The page asks for what is new and is answered as soon as there is any.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socketserver
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from anytrain.core.errors import BadInput
from anytrain.core.records import RunRecord, open_run
from anytrain.core.text import one_line
from anytrain.insight.pages.charts import Chart, chart_data, chart_grid, chart_page, library
from anytrain.insight.pages.markup import beside, embedded, tag
from anytrain.insight.report import watch
from anytrain.insight.report.page_curves import charts_of
from anytrain.insight.report.why import ledger, over_starts, shares

HOST = "127.0.0.1"
STATE = "anytrain-watch"
_LEAST_S = 1.0
"""The least time between two looks; looking takes a tenth of the time at most."""
_EASE = 10
_HOLD_S = 15.0
"""How long a question waits for news."""
_CLIENT_S = 30.0
_ENTRIES, _EVENTS = 15, 15
_MEMORY = {"memory": "Memory", "peak": "Peak memory"}
# Any port: a tunnel (`ssh -L`) may end at another than the server's.
_OWN_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")
_METHODS = ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class Source:
    """What the page shows, made anew from the record when that has grown.

    One thread looks; any number of threads wait for what it finds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: RunRecord | None = None
        self.interval_s = _LEAST_S
        self._watch: watch.RunView | None = None
        self._news = threading.Condition()
        # By the clock, so that a page of an earlier server knows nothing of this one's.
        self._version = self._charts_version = time.time_ns() // 1_000_000
        self._is_closed = False
        self._state: dict[str, Any] = {}
        self._charts: list[Chart] = []
        self.look()

    def look(self) -> None:
        """Read what is new, and tell those who wait."""
        began = time.perf_counter()
        has_grown = self._read()
        charts = charts_of(self.run) if self.run and has_grown else None
        state = waiting(self.folder) if self._watch is None else told(self._watch)
        with self._news:
            if charts is not None and charts != self._charts:
                self._charts, self._charts_version = charts, self._version + 1
            if state != self._state or self._charts_version > self._version:
                self._state = state
                self._version += 1
                self._news.notify_all()
        self.interval_s = max(_LEAST_S, _EASE * (time.perf_counter() - began))

    def after(self, since: int, hold_s: float = _HOLD_S) -> dict[str, Any]:
        """Return what is newer than a version, when there is any; charts only if they are newer.

        After `hold_s` seconds without news only the version is returned.
        """
        with self._news:
            if since > self._version:  # the clock was set back meanwhile
                since = 0
            self._news.wait_for(lambda: self._version > since or self._is_closed, timeout=hold_s)
            found: dict[str, Any] = {"version": self._version}
            if self._version > since:
                found["state"] = self._state
            charts = self._charts if self._charts_version > since else None
        return found if charts is None else {**found, **chart_data(charts)}

    def page(self) -> str:
        with self._news:
            now, charts = {"version": self._version, "state": self._state}, self._charts
        return page(now, charts)

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def _read(self) -> bool:
        if self.run is None:
            try:
                self.run = open_run(self.folder)
            except BadInput:
                return False
            self._watch = watch.RunView(self.run, watch.SilentDisplay)
            has_grown = True
        else:
            has_grown = self.run.refresh()
        if self._watch is not None:
            self._watch.look()
        return has_grown


class Server(ThreadingHTTPServer):
    """The page's server; made, it listens, and `serve_forever` answers."""

    daemon_threads = True
    # On Windows it would let another program take the port over.
    allow_reuse_address = sys.platform != "win32"

    def __init__(self, source: Source, port: int = 0, token: str | None = None) -> None:
        self.source = source
        self.token = token or secrets.token_urlsafe(24)
        super().__init__((HOST, port), RequestHandler)

    def server_bind(self) -> None:
        """Listen, without asking any name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        """The page's address, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; print what else went wrong."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class RequestHandler(BaseHTTPRequestHandler):
    """Answers one question: the page, what is new, or a refusal."""

    server: Server
    server_version, sys_version = "anytrain", ""
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        """Answer those who know the token."""
        if not self._is_meant():
            self._refuse(HTTPStatus.FORBIDDEN, "This page is served on 127.0.0.1 only.")
            return
        try:
            asked = urlsplit(self.path)
            given = parse_qs(asked.query)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "That is not an address.")
            return
        if not self._has_token(given):
            self._refuse(HTTPStatus.FORBIDDEN, "The address lacks the token that was printed.")
        elif asked.path == "/":
            self._answer(self.server.source.page(), "text/html")
        elif asked.path == "/data":
            news = self.server.source.after(_since(given))
            self._answer(json.dumps(news, allow_nan=False), "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def not_allowed(self) -> None:
        """Refuse any other method: nothing can be changed from here."""
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is answered.")

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: it would hold the token."""

    def _is_meant(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and _OWN_NAME.fullmatch(hosts[0].lower()) is not None

    def _has_token(self, given: dict[str, list[str]]) -> bool:
        token = given.get("token", [""])[-1].encode(errors="replace")
        return hmac.compare_digest(token, self.server.token.encode())

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(f"{why}\n", "text/plain", status)

    def _answer(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode()
        self.send_response(status)
        policy = "frame-ancestors 'none'"
        if kind != "text/html":  # the page's own policy is in the page: it names its scripts
            policy = f"default-src 'none'; {policy}"
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


for _method in _METHODS:
    setattr(RequestHandler, f"do_{_method}", RequestHandler.not_allowed)


def serve(
    folder: Path,
    *,
    wait: watch.Wait,
    say: Callable[[str], None],
    port: int | None = None,
    opens: bool = False,
) -> None:
    """Serve a run's page until somebody wants to leave."""
    library()  # where it is missing, say so before anybody opens the page
    source = Source(folder)
    server = _listening(source, port)
    threading.Thread(target=partial(server.serve_forever, 0.2), daemon=True).start()
    try:
        say(f"{folder} is shown at {server.address}\n(q or Ctrl-C ends the page, not the run)")
        with _opened(server.address) if opens else nullcontext():
            _look_until_left(source, wait, say)
    finally:
        source.close()
        server.shutdown()
        server.server_close()


def _look_until_left(source: Source, wait: watch.Wait, say: Callable[[str], None]) -> None:
    was_over = False
    while not wait(source.interval_s):
        source.look()
        is_over = source.run is not None and source.run.state not in watch.ON_ITS_WAY
        if source.run is not None and is_over and not was_over:
            say(f"{watch.ending(source.run)} The page stays until you leave.")
        was_over = is_over


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open the page in a browser by a file that leads to it, and which only this user may read.

    Every user of this machine sees the command line of a browser, and so must not see the token.
    """
    with tempfile.TemporaryDirectory(prefix="anytrain-") as folder:
        path = Path(folder) / "watch.html"
        leads = tag("meta", http_equiv="refresh", content=f"0; url={address}")
        path.write_text(f'<!DOCTYPE html>\n<meta charset="utf-8">\n{leads}\n', encoding="utf-8")
        webbrowser.open(path.as_uri())
        yield


def waiting(folder: Path) -> dict[str, Any]:
    """Return what the page says before there is a record."""
    words = f"Waiting for the record of a run in {one_line(folder)} ..."
    return {"name": folder.name, "kind": "waiting", "words": words}


def told(followed: watch.RunView) -> dict[str, Any]:
    """Return how a run stands, in words and figures for the page."""
    run, view = followed.run, followed.view
    kind = run.state if run.state in (*watch.ON_ITS_WAY, "finished", "ended") else "broken"
    if kind == "finished" and run.unsaved is not None:
        kind = "broken"
    words = watch.standing(run)
    if view.standing.remark:
        kind, words = "silent", f"{words}; {view.standing.remark}"
    rows, lives = _ledger(run), run.counted_lives
    facts = [
        ("Elapsed" if len(lives) < 2 else "Elapsed in this start", view.elapsed()),
        ("Left", view.left()),
        ("Speed", view.speed()),
        *((_MEMORY.get(name, name), value) for name, value in view.standing.memory),
        *view.standing.latest.items(),
        *followed.evaluated.items(),
    ]
    return {
        "name": one_line(run.name),
        "kind": kind,
        "words": words,
        "step": view.step,
        "total": view.course.total,
        "facts": [[name, value] for name, value in facts if value],
        "spent": f"{sum(row[1] for row in rows):.1f} s in all{over_starts(len(lives))}",
        "ledger": rows,
        "entries": _entries(run),
        "events": _events(run),
    }


def page(now: dict[str, Any], charts: list[Chart]) -> str:
    """Return the page with what is known now in it."""
    return chart_page(
        f"{now['state']['name']}: watching",
        tag("h1", now["state"]["name"]),
        tag("p", "", id="lost", role="alert", class_="finding error", hidden="hidden"),
        tag("p", now["state"]["words"], id="words", role="status"),
        tag("div", tag("progress", "", id="bar", aria_label="Steps"), tag("span", "", id="count"),
            id="progress", hidden="hidden"),
        tag("dl", "", id="facts"),
        tag("h2", "Curves"),
        chart_grid(charts),
        tag("h2", "Where the time goes"),
        tag("div", "", id="ledger", class_="wide"),
        tag("h2", "Log"),
        tag("pre", "", id="entries", tabindex="0"),
        tag("h2", "Events"),
        tag("ul", "", id="events"),
        embedded(now, STATE),
        charts=charts,
        styles=(beside("watch.css"),),
        scripts=(beside("watch.js"),),
        connects=True,
    )  # fmt: skip


def _listening(source: Source, port: int | None) -> Server:
    try:
        return Server(source, port or 0)
    except OSError as error:
        raise BadInput(
            f"Cannot serve the page on {HOST}:{port or 0}.",
            why=f"{error.strerror or error}.",
            fix="pass another --port, or none: a free one is taken then.",
        ) from error


def _since(given: dict[str, list[str]]) -> int:
    asked = given.get("since", ["0"])[-1]
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 16 else 0


def _ledger(run: RunRecord) -> list[list[Any]]:
    found = sorted(ledger(run.total.seconds, shares(run.total)), key=lambda row: -row[2])
    return [
        [one_line(name), round(seconds, 1), round(share, 4), meaning]
        for name, seconds, share, meaning in found
    ]


def _entries(run: RunRecord) -> list[str]:
    newest = [watch.shown(raw) for raw in reversed(run.metrics[-_ENTRIES:])]
    return [
        "  ".join([f"step {one.step}", *(f"{name} {value}" for name, value in one.pairs())])
        for one in newest
    ]


def _events(run: RunRecord) -> list[str]:
    found = [watch.event_words(event) for event in run.events]
    found += [watch.apart_words(raw) for raw in run.apart]
    return [words for words in reversed(found) if words][:_EVENTS]
