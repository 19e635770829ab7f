"""Serve pages about a job to a browser or a scraper over HTTP; generate each page when it is requested.

    bound to          without a token                                 with a token
    loopback          requests whose Host is a name of this machine   requests that have the token
    another address   refused at construction (ValueError)            requests that have the token

An address that other hosts can reach is never served without a token.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from io import BytesIO
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.request_server import BACKLOG, Answer, RequestServer
from phalanx.errors import LaunchError

_MOST_BYTES = 1 << 14  # of a request's head
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")


class Page(NamedTuple):
    """A `Page` is the content to send: its type and its bytes."""

    content_type: str
    content: bytes


Pages = Mapping[str, Callable[[], Page]]


class HTTPServer:
    """`HTTPServer` serves `pages` by path, in its own threads, until `close`; pages are generated one at a time.

    A request must have `token`, as `Authorization: Bearer TOKEN` or as `?token=TOKEN`, unless `token` is empty. Each
    connection gets one answer. Whatever the clients do, the server has two threads and a limited number of connections
    (`RequestServer`).

    Raises:
        ValueError: the address is reachable from other machines, and there is no token.
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int, pages: Pages, *, token: str = "") -> None:
        if not token and not is_loopback(host):
            raise ValueError(f"other hosts can reach {host}, so a token is required")
        self._pages, self._token = pages, token
        listener = listen(Address(host, port), BACKLOG)
        self.host, self.port = host, int(listener.getsockname()[1])
        self._server = RequestServer(listener, self._answer, most_bytes=_MOST_BYTES, name="phalanx-http")

    @property
    def address(self) -> str:
        """Return the server's address, without a token."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Stop serving, without waiting for a page that is being generated."""
        self._server.close()

    def _answer(self, received: bytes) -> Answer | None:
        """Return the answer to a request, once its complete head has been received."""
        head, end, _ = received.partition(b"\r\n\r\n")
        if not end:
            return None
        try:
            request = _Request.parse(head)
            if not request.is_admitted(self._token):
                return _response(403, _text("The token is missing or wrong."))
        except ValueError:
            return _response(400, _text("This is no request."))
        if request.method != "GET":
            return _response(405, _text("Only GET is supported."))
        make = self._pages.get(request.path)
        if make is None:
            return _response(404, _text("There is nothing at this path."))
        return functools.partial(_make, make)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Request(NamedTuple):
    """A `_Request` has the parts of a request's first line, and its header fields by lower-case name."""

    method: str
    path: str
    query: str
    fields: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> _Request:
        """Return the request with this head.

        Raises:
            ValueError: `head` is not the head of a request.
        """
        line, _, fields = head.partition(b"\r\n")
        method, target, _ = line.decode("latin-1").split(" ")
        url = urlsplit(target)
        try:
            found = parse_headers(BytesIO(fields + b"\r\n\r\n"))
        except HTTPException as error:
            raise ValueError(str(error)) from None
        return cls(method, url.path, url.query, {name.lower(): str(value) for name, value in found.items()})

    def is_admitted(self, token: str) -> bool:
        """Return whether the request has `token` or, if `token` is empty, whether its Host is a name of this machine.

        Raises:
            ValueError: the Host field is malformed.
        """
        if not token:  # against DNS rebinding: another site may resolve its own name to 127.0.0.1
            return urlsplit(f"//{self.fields.get('host', '')}").hostname in _OWN_NAMES
        kind, _, given = self.fields.get("authorization", "").partition(" ")
        if kind != "Bearer":
            given = parse_qs(self.query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), token.encode())


def _make(make: Callable[[], Page]) -> bytes:
    try:
        return _response(200, make())
    except LaunchError as error:  # the job has ended, or its agent is busy
        return _response(503, _text(str(error)))
    except Exception as error:  # later requests are still answered
        return _response(500, _text(f"{type(error).__name__}: {error}"))


def _text(line: str) -> Page:
    return Page("text/plain; charset=utf-8", f"{line}\n".encode(errors="backslashreplace"))


def _response(status: int, page: Page) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.content)}",
        "Connection: close",
        "Cache-Control: no-store",
        "Referrer-Policy: no-referrer",  # the address has the token in it
        "X-Content-Type-Options: nosniff",
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + page.content
