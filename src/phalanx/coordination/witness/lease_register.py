"""`LeaseRegister` keeps a witness's vote in an annotation of a Lease, which the API server of Kubernetes keeps in etcd.

    GET ── the Lease with its resourceVersion ──► PUT of the whole, with that version ──► 200: it was still that one
                                                                                     └──► 409: somebody else has written

The API server compares and writes in one step, and a GET without a resourceVersion shows the newest Lease: so has
Kubernetes' documentation it (API concepts).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NoReturn

from phalanx.coordination.witness.address import read_lease
from phalanx.coordination.witness.json_service import JsonService
from phalanx.coordination.witness.service_account import ServiceAccount
from phalanx.errors import CoordinationError

ANNOTATION = "phalanx/witness"  # a JSON object: by a job's name, what the witness has promised and accepted
_API = "coordination.k8s.io/v1"
_MOST_TRIES = 100  # a write between two writes of others is tried so often
_DONE = (200, 201)
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _CONFLICT = 401, 403, 404, 409

_Lease = dict[str, Any]


class LeaseRegister:
    """`LeaseRegister` has values by name in the Lease at lease://NAMESPACE/NAME, which the first write creates.

    Its methods raise CoordinationError where Kubernetes refuses or does not answer. A write reads first; it is tried
    again where somebody else has changed the Lease, and not this value, in between.

    Raises:
        CoordinationError: this host is no pod, or has no service account.
    """

    is_durable = True

    def __init__(self, address: str) -> None:
        lease = read_lease(address)
        self._account = ServiceAccount.find(os.environ)
        self._namespace = lease.namespace or self._account.namespace
        self._name = lease.name
        self._path = f"/apis/{_API}/namespaces/{self._namespace}/leases"
        advice = f": the CA of the cluster, {self._account.folder / 'ca.crt'}, has not signed it"
        self._service = JsonService("Kubernetes", self._account.host, self._account.port, self._account.tls(), advice)

    def read(self, name: str) -> bytes:
        """Return a value; nothing where there is none."""
        return self._values_of(self._get()).get(name, b"")

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Write a value in place of the expected one (nothing: there is none yet); return whether it was that one."""
        for _ in range(_MOST_TRIES):
            lease = self._get()
            values = self._values_of(lease)
            if values.get(name, b"") != expected:
                return False
            if self._put(lease, {**values, name: value}):
                return True
        raise CoordinationError(f"others write to {self._describe()} all the time")

    def delete(self, name: str) -> None:
        """Delete a value, if there is one; the Lease stays."""
        for _ in range(_MOST_TRIES):
            value = self.read(name)
            if not value or self.write(name, value, b""):
                return

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""

    def _get(self) -> _Lease | None:
        """Return the newest Lease; None where there is none."""
        status, found = self._call("GET", f"{self._path}/{self._name}")
        if status == _NOT_FOUND:
            return None
        if status not in _DONE:
            self._refuse(status, found)
        return found

    def _put(self, lease: _Lease | None, values: Mapping[str, bytes]) -> bool:
        """Write values in place of those of a Lease as it was read; return whether it was still that one."""
        changed = _change(lease, self._name, {name: value for name, value in values.items() if value})
        if lease is None:
            status, found = self._call("POST", self._path, changed)
        else:
            status, found = self._call("PUT", f"{self._path}/{self._name}", changed)
        if status in _DONE:
            return True
        if status == _CONFLICT or (status == _NOT_FOUND and lease is not None):
            return False
        self._refuse(status, found)

    def _call(self, method: str, path: str, body: _Lease | None = None) -> tuple[int, _Lease]:
        headers = {"Authorization": f"Bearer {self._account.token}", "Accept": "application/json"}
        return self._service.call(method, path, body, headers)

    def _values_of(self, lease: _Lease | None) -> dict[str, bytes]:
        if lease is None:
            return {}
        try:
            text = (lease["metadata"].get("annotations") or {}).get(ANNOTATION)
            holder = (lease.get("spec") or {}).get("holderIdentity")
            values = {} if text is None else {name: _to_bytes(value) for name, value in json.loads(text).items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CoordinationError(f"{self._describe()} has no annotation {ANNOTATION} as Phalanx writes it") from None
        if text is None and holder:  # others elect their leaders with such Leases
            raise CoordinationError(f"{self._describe()} is held by {holder}, not by Phalanx: choose another name")
        return values

    def _refuse(self, status: int, found: Mapping[str, Any]) -> NoReturn:
        why = f"Kubernetes answers {status} for {self._describe()}: {found.get('message') or found.get('reason')}"
        if status == _UNAUTHORIZED:
            why += f" (it does not take the token in {self._account.folder})"
        if status == _FORBIDDEN:
            why += (
                f" (the pods' service account needs a Role in namespace {self._namespace} with the verbs get, create "
                "and update on leases of coordination.k8s.io; `phalanx manifest kubernetes` writes one)"
            )
        raise CoordinationError(why)

    def _describe(self) -> str:
        return f"the Lease {self._namespace}/{self._name}"


def _change(lease: _Lease | None, name: str, values: Mapping[str, bytes]) -> _Lease:
    """Return a Lease with these values; it keeps its uid and its resourceVersion, which the API server compares."""
    metadata: dict[str, Any] = {"name": name} if lease is None else lease["metadata"]
    text = json.dumps({each: value.decode("latin-1") for each, value in values.items()})
    annotations = {**(metadata.get("annotations") or {}), ANNOTATION: text}
    spec = {} if lease is None else lease.get("spec") or {}
    # Who has written last, and when, for people who look: nothing here reads it.
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": _API,
        "kind": "Lease",
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**spec, "holderIdentity": f"phalanx_{socket.gethostname()}", "renewTime": now},
    }


def _to_bytes(value: str) -> bytes:
    return value.encode("latin-1")
