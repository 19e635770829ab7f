"""Serve, over HTTP, pages about a job to a browser or a scraper; each page is made when it is asked for.

    bound to      without a token                                 with one
    loopback      requests whose Host is a name of this machine   those that bring it
    another       refused                                         those that bring it

Addresses that other hosts reach are never served without a token.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET, AF_INET6
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from phalanx.errors import LaunchError

_PATIENCE_S = 10.0  # with a client that says nothing
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")


class Page(NamedTuple):
    """A page is what is sent: the type of the content, and its bytes."""

    content_type: str
    content: bytes


Pages = Mapping[str, Callable[[], Page]]


class HTTPServer:
    """It serves `pages`, by their paths, in threads of its own until `close`.

    A request must bring `token`, as `Authorization: Bearer TOKEN` or as `?token=TOKEN`; an empty token asks for none.

    Raises:
        ValueError: the address is not that of this machine alone, and there is no token.
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int, pages: Pages, *, token: str = "") -> None:
        if not token and not is_loopback(host):
            raise ValueError(f"others can reach {host}, and nothing is served to whoever comes by")
        self._server = _Server(host, port, pages, token)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="phalanx-http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the server's address, without a token."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Serve no more pages."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that reads slowly keeps nobody waiting

    def __init__(self, host: str, port: int, pages: Pages, token: str) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self.pages, self.token = pages, token
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""

    def do_GET(self) -> None:
        """Answer with a page."""
        url = urlsplit(self.path)
        if not self._is_admitted(url.query):
            return
        make = self.server.pages.get(url.path)
        if make is None:
            self._send(404, Page("text/plain; charset=utf-8", b"There is nothing at this path.\n"))
            return
        try:
            page, status = make(), 200
        except LaunchError as error:  # the job has ended, or its agent is busy
            page, status = Page("text/plain; charset=utf-8", f"{error}\n".encode()), 503
        self._send(status, page)

    def _is_admitted(self, query: str) -> bool:
        token = self.server.token
        if token:
            kind, _, given = self.headers.get("Authorization", "").partition(" ")
            if kind != "Bearer":
                given = parse_qs(query).get("token", [""])[0]
            admitted = hmac.compare_digest(given.encode(), token.encode())
        else:  # a page of another site must not reach it by a name of that site's for 127.0.0.1
            admitted = urlsplit(f"//{self.headers.get('Host', '')}").hostname in _OWN_NAMES
        if not admitted:
            self._send(403, Page("text/plain; charset=utf-8", b"The request brings no token, or a wrong one.\n"))
        return admitted

    def _send(self, status: int, page: Page) -> None:
        self.send_response(status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.content)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),  # the address has the token in it
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                        "img-src data:; connect-src 'self'"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page.content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the output belongs to the job."""
