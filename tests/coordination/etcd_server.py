"""A real etcd of one member, without users or with them, by HTTP or by TLS."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKEN_S = 1  # for so long a login is good, if it is not used
USERS = {"root": "the password of root", "train": "the password of train", "nobody": "the password of nobody"}


def find_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in made]


@contextlib.contextmanager
def run_etcd(folder: Path, port: int = 0, *options: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """An etcd, and its address; with `tls` it is asked by that whether it is there."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here (Debian: etcd-server)")
    free, peers = find_free_ports(2)
    port = port or free
    scheme = "http" if tls is None else "https"
    url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    words = ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url,
             "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}",
             "--auth-token-ttl", str(TOKEN_S), "--bcrypt-cost", "4"]  # fmt: skip
    with open(folder / "etcd.log", "wb") as log:
        line = ["etcd", "--data-dir", str(folder / "etcd"), *words, *options]
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        while True:
            assert process.poll() is None, (folder / "etcd.log").read_text()
            with contextlib.suppress(OSError):
                ask(url, "maintenance/status", tls=tls)
                break
        yield f"{scheme.replace('http', 'etcd')}://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def ask(url: str, what: str, tls: ssl.SSLContext | None = None, token: str = "", **body: object) -> dict[str, str]:
    """Ask an etcd's gateway for something, as its administrator does."""
    headers = {"Authorization": token} if token else {}
    request = urllib.request.Request(f"{url}/v3/{what}", json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=10, context=tls) as answer:
        return dict(json.load(answer))


def enable_users(address: str, tls: ssl.SSLContext | None = None) -> None:
    """Have an etcd ask for a user: root, train (of the keys of witnesses) or nobody, who may do nothing."""
    url = address.replace("etcd", "http", 1)
    for user, password in USERS.items():
        ask(url, "auth/user/add", tls, name=user, password=password)
    for role, user in (("root", "root"), ("witness", "train")):
        ask(url, "auth/role/add", tls, name=role)
        ask(url, "auth/user/grant", tls, user=user, role=role)
    keys = {"permType": "READWRITE", "key": "cGhhbGFueC93aXRuZXNzLw==", "range_end": "cGhhbGFueC93aXRuZXNzMA=="}
    ask(url, "auth/role/grant", tls, name="witness", perm=keys)  # phalanx/witness/ up to phalanx/witness0
    ask(url, "auth/enable", tls)
