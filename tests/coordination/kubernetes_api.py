"""The part of Kubernetes' API that has Leases, with its rules for writers that come at the same time.

The rules are those of Kubernetes' documentation (API concepts: resource versions, updates) and of its registry of
Leases: a Lease is written only by who has its newest resourceVersion and its uid (409 otherwise), never without a
resourceVersion (422), and a PUT of one that is not there creates it where the body has no uid. A PUT that changes
nothing leaves the resourceVersion as it is.

    python -m tests.coordination.kubernetes_api HOST FOLDER      serves at HOST; FOLDER gets the service account's files
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import random
import shutil
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.coordination.witness import service_account

TOKEN = "the-first-token"
NAMESPACE = "ml"
PREFIX = "/apis/coordination.k8s.io/v1/namespaces/"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update"}
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 422: "Invalid"}

Answer = tuple[int, dict[str, Any]]


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.answer = code, {**status, "message": message, "reason": reason or _REASONS[code], "code": code}


class LeaseStore:
    """The Leases of a cluster; `answer` is what the API server does with one request."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.namespaces = {NAMESPACE}
        self.tokens = {TOKEN}
        self.verbs = {"get", "create", "update"}
        self.asked: list[tuple[str, int]] = []  # each request, and the status of its answer
        self._lock = threading.Lock()
        self._revision = 1000

    def answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> Answer:
        """Do one request, as a whole."""
        with self._lock:
            try:
                code, found = self._answer(method, path, token, body)
            except Refusal as refusal:
                code, found = refusal.answer
            self.asked.append((method, code))
            return code, copy.deepcopy(found)

    def _answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> Answer:
        if token.removeprefix("Bearer ") not in self.tokens or not token.startswith("Bearer "):
            raise Refusal(401, "Unauthorized")
        namespace, kind, *rest = path.removeprefix(PREFIX).split("/")
        if not path.startswith(PREFIX) or kind != "leases" or len(rest) != (method != "POST"):
            raise Refusal(404, "the server could not find the requested resource")
        verb, name = _VERBS[method], rest[0] if rest else str(body["metadata"]["name"])
        if verb not in self.verbs:
            raise Refusal(
                403,
                f'leases.coordination.k8s.io "{name}" is forbidden: User "system:serviceaccount:{namespace}:train" '
                f'cannot {verb} resource "leases" in API group "coordination.k8s.io" in the namespace "{namespace}"',
            )
        if method == "GET":
            if (namespace, name) not in self.leases:
                raise Refusal(404, f'leases.coordination.k8s.io "{name}" not found')
            return 200, self.leases[namespace, name]
        if (body.get("apiVersion"), body.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
            raise Refusal(400, "the object provided is unrecognized")
        if method == "POST":
            return self._create(namespace, name, body)
        return self._update(namespace, name, body)

    def _create(self, namespace: str, name: str, body: dict[str, Any]) -> Answer:
        if namespace not in self.namespaces:
            raise Refusal(404, f'namespaces "{namespace}" not found')
        if (namespace, name) in self.leases:
            raise Refusal(409, f'leases.coordination.k8s.io "{name}" already exists', "AlreadyExists")
        made = copy.deepcopy(body)
        made["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4()), "managedFields": [{"manager": "python"}]}
        return 201, self._store(namespace, name, made)

    def _update(self, namespace: str, name: str, body: dict[str, Any]) -> Answer:
        metadata, old = body["metadata"], self.leases.get((namespace, name))
        if metadata.get("name") != name:
            raise Refusal(400, "the name of the object does not match the name on the URL")
        uid = "" if old is None else old["metadata"]["uid"]
        if metadata.get("uid", uid) != uid:
            raise self._conflict(name, f"Precondition failed: UID in precondition: {metadata['uid']}, got: {uid}")
        if old is None:
            return self._create(namespace, name, body)
        if not metadata.get("resourceVersion"):
            raise Refusal(422, f'leases.coordination.k8s.io "{name}" is invalid: metadata.resourceVersion: Invalid')
        if metadata["resourceVersion"] != old["metadata"]["resourceVersion"]:
            raise self._conflict(name, "the object has been modified; please apply your changes to the latest version")
        return 200, old if body == old else self._store(namespace, name, copy.deepcopy(body))

    def _conflict(self, name: str, why: str) -> Refusal:
        return Refusal(409, f'Operation cannot be fulfilled on leases.coordination.k8s.io "{name}": {why}', "Conflict")

    def _store(self, namespace: str, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        self._revision += random.randint(1, 5)  # etcd counts the writes of everything in the cluster
        lease["metadata"]["resourceVersion"] = str(self._revision)
        self.leases[namespace, name] = lease
        return lease


Meddler = Callable[[str, Callable[[], Answer]], Answer | None]
"""It is given a request's method and what does it, and returns the answer; None: the connection is closed instead."""


class ApiServer(http.server.ThreadingHTTPServer):
    """An API server on a port of its own."""

    daemon_threads = False  # each is waited for

    def __init__(self, host: str, tls: ssl.SSLContext | None) -> None:
        self.store = LeaseStore()
        self.meddler: Meddler | None = None
        super().__init__((host, 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that do not trust the certificate, or wait no longer, go."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        token = self.headers.get("Authorization", "")

        def do() -> Answer:
            return self.server.store.answer(self.command, self.path, token, body)

        answer = do() if self.server.meddler is None else self.server.meddler(self.command, do)
        self.close_connection = True
        if answer is None:
            return
        data = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _do

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


def make_certificates(folder: Path, host: str, subject: str = "/CN=kube-apiserver") -> tuple[Path, Path, Path]:
    """Return a CA's certificate, a server's for this address, and that one's key, with as few extensions as old CAs."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here, which makes the certificates")
    ca, ca_key, certificate, key = (folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key"))
    request, extensions = folder / "server.csr", folder / "extensions"
    extensions.write_text(f"subjectAltName=IP:{host}\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
    for words in (
        ("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=kubernetes"),
        ("req", *curve[:-2], "-keyout", key, "-out", request, "-subj", subject),
        ("x509", "-req", "-in", request, *signed, "-out", certificate),
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return ca, certificate, key


def write_account(folder: Path, ca: Path) -> Path:
    """The files that a pod finds, in a folder."""
    account = folder / "serviceaccount"
    account.mkdir()
    shutil.copy(ca, account / "ca.crt")
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(NAMESPACE)
    return account


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[tuple[ApiServer, Path]]:
    """An API server by HTTPS, and the folder of a service account that it takes."""
    ca, certificate, key = make_certificates(folder, host)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with ApiServer(host, tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="phalanx-test-api")
        thread.start()
        try:
            yield server, write_account(folder, ca)
        finally:
            server.shutdown()
            thread.join()


def enter_pod(patch: pytest.MonkeyPatch, server: ApiServer, account: Path) -> None:
    """Have this process find an API server as a pod finds it."""
    host, port = server.server_address[:2]
    patch.setenv("KUBERNETES_SERVICE_HOST", str(host))
    patch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    patch.setattr(service_account, "_FOLDER", account)


if __name__ == "__main__":
    with serving(Path(sys.argv[2]), sys.argv[1]) as (_server, _account):
        print(f"serving {_server.server_address[1]} {_account}", flush=True)
        os.read(0, 1)
        print(json.dumps(list(_server.store.leases.values())), flush=True)
