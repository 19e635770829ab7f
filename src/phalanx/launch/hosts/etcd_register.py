"""`EtcdRegister` keeps a witness's vote in an etcd, which it asks by the JSON gateway that etcd's version 3 has."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from phalanx.errors import CoordinationError

_SCHEMES = {"etcd": "http", "etcds": "https"}
_ANSWER_S = 2.0


def is_etcd(address: str) -> bool:
    """Return whether an address is that of an etcd: etcd://HOST:PORT, or etcds:// with TLS."""
    return address.partition("://")[0] in _SCHEMES


class EtcdRegister:
    """`EtcdRegister` has values by name in the etcd at etcd://HOST:PORT.

    Its methods raise CoordinationError where etcd refuses or does not answer.
    """

    is_durable = True

    def __init__(self, address: str) -> None:
        scheme, _, place = address.partition("://")
        self._url = f"{_SCHEMES[scheme]}://{place.rstrip('/')}/v3/kv/"

    def read(self, name: str) -> bytes:
        """Return a value; nothing where there is none."""
        found = self._call("range", {"key": _encode(name.encode())}).get("kvs", [])
        return base64.b64decode(found[0]["value"]) if found else b""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Write a value in place of the expected one (nothing: there is none yet); return whether it was that one."""
        key = _encode(name.encode())
        compare = {"key": key, "target": "VALUE", "result": "EQUAL", "value": _encode(expected)}
        if not expected:
            compare = {"key": key, "target": "VERSION", "result": "EQUAL", "version": "0"}
        put = {"requestPut": {"key": key, "value": _encode(value)}}
        return bool(self._call("txn", {"compare": [compare], "success": [put]}).get("succeeded"))

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""
        self._call("deleterange", {"key": _encode(name.encode())})

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""

    def _call(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self._url + what, json.dumps(body).encode(), method="POST")
        directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with directly.open(request, timeout=_ANSWER_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise CoordinationError(f"etcd answers {error.code}: {error.read(200).decode(errors='replace')}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CoordinationError(f"etcd does not answer: {error}") from None
        if not isinstance(found, dict):
            raise CoordinationError("what answers there is no etcd")
        return found


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()
