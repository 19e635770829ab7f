"""`JsonService` calls a service that speaks JSON over HTTP, as etcd does; each call ends in seconds."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any, cast

from phalanx._base.deadline import Deadline
from phalanx.errors import CoordinationError

_ANSWER_S = 2.0
_MOST_BYTES = 8 << 20
_SHOWN = 200  # characters of an answer that makes no sense


class JsonService:
    """`JsonService` opens a direct connection for each call, ignoring the environment's proxies.

    Arguments:
        name: the service's name in messages.
        tls: the context of HTTPS; None for HTTP.
        advice: what to do if the service's certificate is rejected.
    """

    def __init__(self, name: str, host: str, port: int, tls: ssl.SSLContext | None = None, advice: str = "") -> None:
        self._name = name
        self._place = host, port
        self._tls = tls
        self._advice = advice

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the object that were answered; after an error other than 200 its text is in `message`.

        A call may have been carried out although it raises, where its answer was lost.

        Raises:
            CoordinationError: the service cannot be reached, does not answer in two seconds, or is another one.
        """
        try:
            status, text = self._exchange(method, path, body, headers or {})
        except ssl.SSLCertVerificationError as error:
            raise CoordinationError(
                f"the certificate of {self._name} is not accepted: {error.verify_message}{self._advice}"
            ) from None
        except ssl.SSLError as error:
            raise CoordinationError(f"{self._name} does not answer by TLS: {error.reason or error}") from None
        except TimeoutError:
            raise CoordinationError(f"{self._name} does not answer within {_ANSWER_S:.0f} s") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CoordinationError(f"{self._name} does not answer: {error or type(error).__name__}") from None
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return status, found
        if status < 300:
            raise CoordinationError(f"what answers there is not {self._name}")
        return status, {"message": text[:_SHOWN].decode(errors="replace").strip()}

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        deadline = Deadline.after(_ANSWER_S)
        data = None if body is None else json.dumps(body).encode()
        with contextlib.closing(self._connection()) as connection:
            connection.connect()
            connection.sock.settimeout(deadline.left_s or 0.001)
            # The service closes the connection behind its answer, so that all of it has come when it ends.
            connection.request(
                method, path, data, {"Content-Type": "application/json", "Connection": "close", **headers}
            )
            received = _receive(connection.sock, deadline)
            answer = http.client.HTTPResponse(cast(socket.socket, _Received(received)), method=method)
            answer.begin()
            return answer.status, answer.read()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(*self._place, timeout=_ANSWER_S)
        return http.client.HTTPSConnection(*self._place, timeout=_ANSWER_S, context=self._tls)


class _Received:
    """`_Received` passes received bytes to `HTTPResponse`."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def _receive(sock: socket.socket, deadline: Deadline) -> bytes:
    """Return all that comes until the other side closes; a timeout of the socket alone would hold for each byte."""
    received = bytearray()
    while len(received) <= _MOST_BYTES:
        if deadline.passed:
            raise TimeoutError
        sock.settimeout(deadline.left_s or 0.001)
        data = sock.recv(1 << 16)
        if not data:
            return bytes(received)
        received += data
    raise ValueError(f"an answer has more than {_MOST_BYTES} bytes")


def make_tls(ca_file: str = "", certificate: str = "", private_key: str = "") -> ssl.SSLContext:
    """Return a context that accepts certificates of this CA, or else the system's, and presents `certificate`, if any.

    Raises:
        OSError, ssl.SSLError: a file cannot be read or is invalid.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    # Since Python 3.13 certificates need extensions that the CAs of many clusters do not write.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if certificate:
        context.load_cert_chain(certificate, private_key or None, password="")
    return context
