"""Who the live page's server answers, and what it says."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.insight.report.web import Server, Source, serve
from launching import run_command
from made_records import Record

NASTY = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    found = Record(tmp_path / "run")
    found.begin()
    found.train(range(1, 31))
    return found


@pytest.fixture
def server(record: Record) -> Iterator[Server]:
    found = Server(Source(record.folder), token="the-token")
    thread = threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer, answer.read()
    finally:
        connection.close()


def news(server: Server, since: int) -> dict[str, Any]:
    status, _, body = ask(server, f"/data?token=the-token&since={since}")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in own - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, server.server_port), timeout=2).close()


@pytest.mark.parametrize(
    "path",
    ["/", "/?token=", "/?token=the-toke", "/?token=the-tokenx", "/data", "/data?token=%C3%A4",
     "/data?token=the-token&token=x", "/etc/passwd"],
)  # fmt: skip
def test_nobody_is_answered_without_the_token(server: Server, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 403 and b"step" not in body


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:{port}", "evil.example:{port}", "127.0.0.1:x", ""],
)
def test_a_name_that_merely_points_here_is_refused(server: Server, host: str) -> None:
    named = host.format(port=server.server_port)
    assert ask(server, "/?token=the-token", Host=named)[0] == 403


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "LOCALHOST:9999", "127.0.0.1:9999", "localhost", "[::1]:9999"]
)
def test_this_machine_s_own_names_are_answered_whatever_port_a_tunnel_begins_at(
    server: Server, host: str
) -> None:
    assert ask(server, "/?token=the-token", Host=host.format(port=server.server_port))[0] == 200


@pytest.mark.parametrize(("host", "status"), [("localhost", 400), ("evil.example", 403)])
def test_a_request_that_makes_no_sense_is_refused_without_a_word_in_the_terminal(
    server: Server, host: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=240) as client:
        client.sendall(f"GET http://[ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert client.recv(4096).startswith(f"HTTP/1.0 {status} ".encode())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(server: Server, method: str) -> None:
    status, answer, _ = ask(server, "/?token=the-token", method)
    assert (status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/index.html", "/data/", "/../metrics.jsonl", "/metrics.jsonl"])
def test_no_file_is_served(server: Server, path: str) -> None:
    assert ask(server, f"{path}?token=the-token")[0] == 404


def test_the_page_is_kept_by_nobody_and_framed_by_nobody(server: Server) -> None:
    for path in ("/", "/data"):
        status, answer, _ = ask(server, f"{path}?token=the-token")
        assert status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Python" not in answer.headers["Server"]


def test_the_page_may_ask_its_own_server_and_nobody_else(server: Server) -> None:
    page = ask(server, "/?token=the-token")[2].decode()
    assert "default-src 'none'" in page and "connect-src 'self'" in page
    assert "unsafe" not in page.partition("</head>")[0].partition("<style>")[0]
    assert "the-token" not in page


def test_news_come_as_soon_as_they_are_there_and_charts_only_when_they_changed(
    server: Server, record: Record
) -> None:
    first = news(server, 0)
    assert first["state"]["step"] == 30 and len(first["charts"][0]["series"][0]["x"]) == 3
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(news(server, first["version"])))
    asking.start()
    record.train(range(31, 51))
    server.source.look()
    asking.join(timeout=240)
    assert answers[0]["state"]["step"] == 50
    assert len(answers[0]["charts"][0]["series"][0]["x"]) == 5
    record.event("notice", text="something")
    server.source.look()
    after = news(server, answers[0]["version"])
    assert after["state"]["events"] == ["notice: something"]


def test_a_page_of_an_earlier_server_gets_everything_again(server: Server, record: Record) -> None:
    before = news(server, 0)["version"]
    record.train(range(31, 51))
    later = Source(record.folder)
    assert "charts" in later.after(before) and "charts" in later.after(10**15 - 1)


def test_a_server_that_closes_keeps_nobody_waiting(record: Record) -> None:
    source = Source(record.folder)
    version = source.after(0)["version"]
    waiting = threading.Thread(target=source.after, args=(version, 60.0))
    waiting.start()
    source.close()
    waiting.join(timeout=240)
    assert not waiting.is_alive()


def test_without_news_the_answer_comes_all_the_same(record: Record) -> None:
    source = Source(record.folder)
    version = source.after(0)["version"]
    assert source.after(version, hold_s=0.01) == {"version": version}


def test_before_there_is_a_record_the_page_waits_for_it(tmp_path: Path) -> None:
    source = Source(tmp_path / "run")
    first = source.after(0)
    assert first["state"]["kind"] == "waiting" and first["charts"] == []
    assert "Waiting for the record" in source.page()
    later = Record(tmp_path / "run")
    later.begin()
    later.train(range(1, 11))
    source.look()
    assert source.after(first["version"])["state"]["kind"] == "running"


def test_the_end_of_a_run_is_told(record: Record) -> None:
    record.end(30)
    told = Source(record.folder).after(0)["state"]
    assert (told["kind"], told["words"]) == ("finished", "Training done.")
    record.begin(30)
    record.train(range(31, 33))
    record.end(32, "failed")
    told = Source(record.folder).after(0)["state"]
    assert (told["kind"], told["words"]) == ("broken", "The run failed at step 32.")


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_nothing_is_left_of_a_run_that_is_over(record: Record, how: str) -> None:
    assert "Left" in dict(Source(record.folder).after(0)["state"]["facts"])
    record.end(30, how)
    assert "Left" not in dict(Source(record.folder).after(0)["state"]["facts"])


def test_what_a_run_wrote_is_text_and_never_markup(record: Record) -> None:
    record.log(30, **{NASTY: 1.0, "loss": float("nan")})
    record.event("notice", text=NASTY)
    page = Source(record.folder).page()
    assert "<img" not in page and page.count("</script>") == page.count("<script")


def test_a_busy_port_is_said_to_be_busy(server: Server, record: Record) -> None:
    with pytest.raises(BadInput, match=f"127.0.0.1:{server.server_port}.*\n.*in use"):
        serve(record.folder, wait=lambda s: True, say=print, port=server.server_port)


def test_serving_ends_when_somebody_leaves_and_tells_of_the_run_s_end_once(
    record: Record,
) -> None:
    said: list[str] = []
    looks = iter([record.train, lambda _: record.end(40), lambda _: None, lambda _: None])

    def wait(seconds: float) -> bool:
        act = next(looks, None)
        if act is not None:
            act(range(31, 41))
        return act is None

    serve(record.folder, wait=wait, say=said.append)
    assert "is shown at http://127.0.0.1:" in said[0] and "?token=" in said[0]
    assert said[1:] == ["Training done. The page stays until you leave."]


@pytest.mark.skipif(sys.platform == "win32", reason="files have no modes there")
def test_the_browser_is_opened_without_the_token_in_its_command_line(
    record: Record, tmp_path: Path
) -> None:
    # As a person sets it up: by BROWSER, and a command.
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {tmp_path}/given.new\n'
        f'cat "${{1#file://}}" > {tmp_path}/read\nls -ld "$(dirname "${{1#file://}}")" '
        f"> {tmp_path}/mode\nmv {tmp_path}/given.new {tmp_path}/given\n"
    )
    browser.chmod(0o755)
    given = tmp_path / "given"
    code = (
        "import sys, time, pathlib; from anytrain.insight.report.web import serve;"
        f"there = pathlib.Path({str(given)!r});"
        f"serve(pathlib.Path({str(record.folder)!r}), opens=True, say=print,"
        " wait=lambda s: bool(time.sleep(0.05)) or there.exists())"
    )
    environment = {"BROWSER": f"{browser} %s"}
    done = run_command([sys.executable, "-c", code], env=environment)
    address = re.search(r"http://\S+token=\S+", done.stdout)
    assert address is not None and given.read_text().startswith("file://")
    assert "token" not in given.read_text()
    assert address[0] in (tmp_path / "read").read_text()
    assert (tmp_path / "mode").read_text().startswith("drwx------")
    assert not Path(given.read_text().strip().removeprefix("file://")).exists()
