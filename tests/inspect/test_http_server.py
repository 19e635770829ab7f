"""Who gets a page of a job, and who does not."""

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx._comm.control.request_server import MOST_OPEN
from phalanx._job.inspect.http_server import HTTPServer, Page
from phalanx.errors import LaunchError


def fail():
    raise LaunchError("the job has ended")


PAGES = {"/": lambda: Page("text/plain", b"the job"), "/broken": fail}


@contextlib.contextmanager
def served(token=""):
    server = HTTPServer("127.0.0.1", 0, PAGES, token=token)
    try:
        yield server
    finally:
        server.close()


def get(server, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_a_page_is_made_when_it_is_asked_for():
    with served() as server:
        assert get(server) == (200, "the job")
        assert get(server, "/other")[0] == 404
        assert get(server, "/broken") == (503, "the job has ended\n")


def test_without_a_token_only_a_name_of_this_machine_reaches_it():
    """A page of another site reaches 127.0.0.1 by a name of its own, if that is all that is asked (DNS rebinding)."""
    with served() as server:
        assert get(server, Host=f"localhost:{server.port}")[0] == 200
        assert get(server, Host="evil.example")[0] == 403


def test_with_a_token_only_who_brings_it_gets_the_page():
    with served(token="secret") as server:
        assert get(server)[0] == 403
        assert get(server, "/?token=wrong")[0] == 403
        assert get(server, Authorization="Bearer wrong")[0] == 403
        assert get(server, "/?token=secret") == (200, "the job")
        assert get(server, Authorization="Bearer secret", Host="gpu-7.example:9400") == (200, "the job")


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(ValueError, match=r"other hosts can reach 0\.0\.0\.0, so a token is required"):
        HTTPServer("0.0.0.0", 0, PAGES)
    server = HTTPServer("0.0.0.0", 0, PAGES, token="secret")
    try:
        assert get(server)[0] == 403
        assert get(server, "/?token=secret")[0] == 200
    finally:
        server.close()


def test_rubbish_is_answered_or_shut_out_and_the_next_gets_the_page():
    rng = random.Random(5)
    parts = [
        b"GET ", b"/", b"/ HTTP/1.1\r\n", b"\r\n", b"\r\n\r\n", b"Host: localhost", b"Host: [", b": ", b"\xff\0",
        b"Authorization: Bearer secret", b"Authorization: Bearer \xe9\xff", b"//[::1", b"a: b\r\n" * 200, b" ",
        b"?token=%ff", b"POST / HTTP/1.1\r\n",
    ]  # fmt: skip
    codes = set()
    with served() as server:
        for _ in range(1000):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger:
                stranger.sendall(b"".join(rng.choices(parts, k=rng.randrange(1, 9))) + b"\r\n\r\n")
                with contextlib.suppress(ConnectionError):  # more was said than one request
                    codes.add(stranger.recv(12))
        assert get(server) == (200, "the job")
    assert {b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 405"} <= codes


_SERVE = """
import sys
from phalanx._job.inspect.http_server import HTTPServer, Page

server = HTTPServer("127.0.0.1", 0, {"/": lambda: Page("text/plain", bytes(1 << 18))}, token=sys.argv[1])
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""
_MOST_DESCRIPTORS = 2 * MOST_OPEN + 20
_MOST_MIB = 64  # more than before: 64 answers of 256 KiB that nobody reads, twice, and 64 beginnings of requests


def costs(pid):
    """The threads, the descriptors and the MiB of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kibibytes = int(status.partition("VmRSS:")[2].split()[0])
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")), kibibytes / 1024


def strangers(port, said, *, addresses=40, each=12):
    """Connections from many addresses of this machine, over each of which something was said, and nothing is read."""
    found = []
    for number in range(addresses * each):
        stranger = socket.socket()
        found.append(stranger)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stranger.bind((f"127.0.0.{2 + number % addresses}", 0))
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))
    for stranger in found:
        with contextlib.suppress(OSError):
            stranger.send(said)
    return found


@pytest.mark.slow(but=("secret",))
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and connects from addresses that are nobody's")
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_flood_costs_few_threads_descriptors_and_bytes_and_a_scraper_is_served(token):
    """Each connection had a thread and a descriptor for as long as it liked, and 6 MiB for its header."""
    floods = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 3000,
        b"GET /?token=wrong HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    line = [sys.executable, "-c", _SERVE, token]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, **pipes, text=True) as process, contextlib.ExitStack() as open_ones:
        address = SimpleNamespace(port=int(process.stdout.readline()))
        assert get(address, f"/?token={token}")[0] == 200
        threads, _, memory = costs(process.pid)
        for said in floods:
            for stranger in strangers(address.port, said):
                open_ones.enter_context(stranger)
            for _ in range(5):
                assert get(address, f"/?token={token}") == (200, "\0" * (1 << 18))
                now = costs(process.pid)
                assert now[0] == threads == 3
                assert now[1] <= _MOST_DESCRIPTORS
                assert now[2] - memory < _MOST_MIB
        open_ones.close()
        process.stdin.close()
        assert process.wait(60) == 0
