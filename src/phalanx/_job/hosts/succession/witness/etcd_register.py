"""`EtcdRegister` keeps a witness's vote in etcd, through the JSON gateway of etcd 3."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any, cast

from phalanx._base.deadline import Deadline
from phalanx._job.hosts.succession.witness.address import NO_USERS, split_etcd
from phalanx.errors import CoordinationError

_OK = 200
_ASKS_FOR_USER = (400, 401, 403)  # what an etcd with authentication answers to a request without a user


class EtcdRegister:
    """An `EtcdRegister` stores named values in the etcd at etcd://HOST:PORT, or etcds:// with TLS.

    Its methods raise CoordinationError if etcd refuses or does not answer. Each call opens its own connection.

    Raises:
        CoordinationError: a certificate file cannot be read.
    """

    is_durable = True

    def __init__(self, address: str) -> None:
        has_tls, host, port = split_etcd(address)
        tls = find_tls(os.environ) if has_tls else None
        self._service = JsonService("etcd", host, port, tls, ". ETCDCTL_CACERT names the file of its CA")

    def read(self, name: str) -> bytes:
        found = self._call("range", {"key": _encode(name.encode())}).get("kvs", [])
        return base64.b64decode(found[0]["value"]) if found else b""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        key = _encode(name.encode())
        compare = {"key": key, "target": "VALUE", "result": "EQUAL", "value": _encode(expected)}
        if not expected:
            compare = {"key": key, "target": "VERSION", "result": "EQUAL", "version": "0"}
        put = {"requestPut": {"key": key, "value": _encode(value)}}
        return bool(self._call("txn", {"compare": [compare], "success": [put]}).get("succeeded"))

    def delete(self, name: str) -> None:
        self._call("deleterange", {"key": _encode(name.encode())})

    def close(self) -> None:
        """Do nothing: each call opens its own connection."""

    def _call(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        status, found = self._service.call("POST", f"/v3/kv/{what}", body)
        if status != _OK:
            advice = f" ({NO_USERS})" if status in _ASKS_FOR_USER else ""
            raise CoordinationError(f"etcd answers {status}: {found.get('message')}{advice}")
        return found


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def find_tls(variables: Mapping[str, str]) -> ssl.SSLContext:
    """Return the TLS context from ETCDCTL_CACERT (by default the system's CAs), ETCDCTL_CERT and ETCDCTL_KEY.

    Raises:
        CoordinationError: one of the files cannot be read.
    """
    names = [variables.get(f"ETCDCTL_{name}", "") for name in ("CACERT", "CERT", "KEY")]
    try:
        return _make_tls(*names)
    except OSError as error:  # includes ssl.SSLError
        raise CoordinationError(
            f"the certificates for etcd cannot be read (ETCDCTL_CACERT={names[0]} ETCDCTL_CERT={names[1]} "
            f"ETCDCTL_KEY={names[2]}): {error}"
        ) from None


# Call a service that speaks JSON over HTTP, as etcd does; each call ends within seconds.

_ANSWER_S = 2.0
_MOST_BYTES = 8 << 20
_SHOWN = 200  # the maximum number of characters shown of an answer that is not JSON


class JsonService:
    """`JsonService` opens a direct connection for each call, and ignores proxy variables such as `https_proxy`.

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

    def call(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the answer's status and JSON object; for an error that is not a JSON object, {"message": its text}.

        A call that raises may have been executed, if only its answer was lost.

        Raises:
            CoordinationError: the service cannot be reached, does not answer in two seconds, or is another service.
        """
        try:
            status, text = self._exchange(method, path, body)
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
            raise CoordinationError(f"the server there is not {self._name}")
        return status, {"message": text[:_SHOWN].decode(errors="replace").strip()}

    def _exchange(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        deadline = Deadline.after(_ANSWER_S)
        with contextlib.closing(self._connection()) as connection:
            connection.connect()
            connection.sock.settimeout(deadline.left_s or 0.001)
            # The service closes the connection after its answer, so the answer is complete at the end of the stream.
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request(method, path, json.dumps(body).encode(), headers)
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
    """Return all bytes until the other side closes; the socket's own timeout would start anew with each `recv`."""
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


def _make_tls(ca_file: str = "", certificate: str = "", private_key: str = "") -> ssl.SSLContext:
    """Return a context that accepts certificates of this CA, or else the system's, and presents `certificate`, if any.

    Raises:
        OSError, ssl.SSLError: a file cannot be read or is invalid.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    # Python 3.13 and later require certificate extensions that the CAs of many clusters omit.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if certificate:
        context.load_cert_chain(certificate, private_key or None, password="")
    return context
