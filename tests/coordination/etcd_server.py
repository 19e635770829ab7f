"""A real etcd of one member, by HTTP or by TLS."""

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
             "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}"]  # fmt: skip
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


def ask(url: str, what: str, tls: ssl.SSLContext | None = None, **body: object) -> dict[str, str]:
    """Ask an etcd's gateway for something, as its administrator does."""
    request = urllib.request.Request(f"{url}/v3/{what}", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10, context=tls) as answer:
        return dict(json.load(answer))
