"""The dashboard answers to its own hosts alone, by HTTP and by websocket, and its pages work under their policy."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twell.app.server.guard import Guard, content_policy, host_names

PATHS = ["/", "/tokens?run=made", "/_stcore/health", "/_stcore/host-config", "/media/0.csv", "/static/js/gone.js"]
STREAM = "/_stcore/stream"
FOREIGN = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "localhost@evil.example", "", "[::1"]
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def ask(address: str, path: str, host: str | None, more: str = "Connection: close\r\n") -> tuple[int, str]:
    """The status and the rest of the answer to a GET with the given Host header, written to a bare socket."""
    name, port = address.removeprefix("http://").split(":")
    line = "" if host is None else f"Host: {host.format(port=port)}\r\n"
    with socket.create_connection((name, int(port)), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n{line}{more}\r\n".encode())
        answer = connection.recv(2**16)
        while b"\r\n\r\n" not in answer or (more.startswith("Connection: close") and answer[-1:] != b""):
            piece = connection.recv(2**16)
            if not piece:
                break
            answer += piece
    return int(answer.split()[1]), answer.decode("utf-8", "replace")


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_is_refused_in_one_sentence(address: str, host: str) -> None:
    for path in PATHS:
        status, answer = ask(address, path, host)
        assert status in (400, 403), (path, answer)
        assert "run_" not in answer
        if status == 403:
            body = answer.partition("\r\n\r\n")[2]
            assert re.fullmatch(r"Expected a request to 127\.0\.0\.1, ::1, localhost, got the host .*\.\n", body)
            assert "frame-ancestors 'none'" in answer


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST.:9", "[::1]:{port}", "localhost"])
def test_its_own_hosts_are_answered_through_any_port(address: str, host: str) -> None:
    assert ask(address, "/_stcore/health", host)[0] == 200
    status, answer = ask(address, "/", host)
    assert status == 200
    head = answer.partition("\r\n\r\n")[0].lower()
    assert head.count("x-frame-options: deny") == 1
    assert head.count("content-security-policy: default-src 'self'; script-src 'self' 'sha256-") == 1


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 101),
        ("localhost:{port}", "http://localhost:{port}", 101),
        ("localhost:7", "http://localhost:7", 101),  # through a tunnel
        ("127.0.0.1:{port}", None, 101),  # no browser
        ("evil.example:{port}", "http://evil.example:{port}", 403),
        ("evil.example:{port}", None, 403),
        ("127.0.0.1:{port}", "http://evil.example", 403),
        ("127.0.0.1:{port}", "http://evil.example:{port}", 403),
        ("127.0.0.1:{port}", "http://127.0.0.1:1", 403),  # a page that another program on this machine serves
        ("127.0.0.1:{port}", "null", 403),
    ],
)
def test_a_websocket_is_for_pages_of_this_server(address: str, host: str, origin: str | None, status: int) -> None:
    port = address.rpartition(":")[2]
    more = UPGRADE + ("" if origin is None else f"Origin: {origin.format(port=port)}\r\n")
    got, answer = ask(address, STREAM, host, more)
    assert got == status, answer
    if got == 403:
        assert "Expected a" in answer


def test_the_names_of_an_address() -> None:
    for host in ("localhost", "127.0.0.1", "::1", "[::1]"):
        assert host_names(host) == {"localhost", "127.0.0.1", "::1"}
    assert host_names("127.0.0.2") == {"localhost", "127.0.0.1", "::1", "127.0.0.2"}
    assert {"10.1.2.3", "localhost", socket.gethostname().lower()} <= host_names("10.1.2.3")
    assert "Node7.Example".lower() in host_names("Node7.Example.")


@pytest.fixture
def status_of() -> Callable[..., int]:
    """The status of a request with these Host headers, to a server started at a host."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(started_at: str, *hosts: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "headers": [(b"host", host.encode()) for host in hosts]}
        with ThreadPoolExecutor(1) as pool:  # the browser of other tests has a loop in this thread
            pool.submit(asyncio.run, Guard(app, started_at, "default-src 'self'")(scope, None, send)).result()
        return int(sent[0]["status"])

    return status


def test_a_server_on_all_addresses_answers_to_numbers_but_not_to_foreign_names(status_of: Callable[..., int]) -> None:
    for host in ("0.0.0.0", "::"):
        for own in ("192.0.2.7:8501", "[2001:db8::7]:8501", "localhost", socket.gethostname()):
            assert status_of(host, own) == 200
        assert status_of(host, "evil.example") == 403
    assert status_of("10.1.2.3", "10.1.2.3:8501") == 200
    assert status_of("10.1.2.3", "10.1.2.4:8501") == 403
    assert status_of("node7.example", "node7.example:8501") == 200
    assert status_of("127.0.0.1", "192.0.2.7") == 403
    assert status_of("127.0.0.1") == 403
    assert status_of("127.0.0.1", "127.0.0.1", "evil.example") == 403


def test_the_policy_allows_no_script_of_another_place() -> None:
    scripts = re.findall(r"script-src ([^;]+)", content_policy())
    assert len(scripts) == 1
    assert all(source == "'self'" or source.startswith("'sha256-") for source in scripts[0].split())
    assert "http" not in content_policy()


def test_a_script_put_into_a_page_does_not_run(new_page: Callable[..., Any], address: str) -> None:
    page = new_page()
    page.goto(f"{address}/?run=made")
    page.wait_for_selector(".tw-numbers", timeout=60_000)
    page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = 'window.twellHurt = 1';
          document.body.append(script);
          const image = document.createElement('img');
          image.setAttribute('onerror', 'window.twellHurt = 2');
          image.src = 'data:,';
          document.body.append(image);
        }"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.twellHurt") is None


def test_no_page_can_frame_the_dashboard(new_page: Callable[..., Any], address: str) -> None:
    page = new_page()
    page.goto(f"{address}/_stcore/health")
    page.set_content(f'<iframe src="{address}/?run=made"></iframe>')
    page.wait_for_timeout(1500)
    assert not [frame for frame in page.frames[1:] if frame.query_selector(".tw-numbers, [data-testid='stApp']")]
