"""The socket by which ranks and agent speak is attacked while a rank is lost: it goes on, and says by whom, once."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from tests.system.elastic_job import elastic_job

from phalanx._base.ipc.channel import Channel

NOBODY = 65534


def connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{name}")
    return sock


def find_name(agent: int) -> str:
    """Anybody can read it."""
    found = re.search(rf"@(phalanx-agent-{agent}-\w+)", Path("/proc/net/unix").read_text())
    assert found is not None
    return found[1]


def say_without_token(name: str) -> None:
    for kind in ("elastic", "group", "progress page", "store"):
        message = {"kind": kind, "pid": os.getpid(), "rank": 1, "token": "0" * 32}
        with closing(Channel(connect(name))) as channel:
            channel.send(message)
            assert channel.receive() is None


def say_garbage(name: str) -> None:
    read, write = os.pipe()
    try:
        for body in (b"{", os.urandom(4096), b"[" * 100_000):
            for data in (body, struct.pack("!I", len(body)) + body):
                with connect(name) as sock:
                    socket.send_fds(sock, [data], [read, write, read])
    finally:
        os.close(read)
        os.close(write)


def say_nothing(name: str) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(name))


@contextmanager
def kept_up(attack: Callable[[str], None], name: str) -> Iterator[None]:
    """Inside, it happens again and again."""
    over, begun = threading.Event(), threading.Event()

    def go_on() -> None:
        while not over.is_set():
            try:
                attack(name)
            except OSError:
                pass  # shown out, or there was no room
            begun.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        thread.join()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


ATTACKS = {
    say_without_token: "has sent a message without the job's token",
    say_garbage: "has sent what is no message of Phalanx",
    say_nothing: "has opened a connection and sends nothing",
}


@pytest.mark.slow
def test_a_rank_is_replaced_while_others_flood_the_agent_and_each_kind_is_told_once(tmp_path: Path) -> None:
    with elastic_job(tmp_path) as job:
        agent = job.running.process.pid
        name, before = find_name(agent), resident_bytes(agent)
        for generation, attack in enumerate(ATTACKS, start=1):
            with kept_up(attack, name):
                job.kill(1)
                job.wait_joined(generation, 1)
                job.wait_generation(generation, 3)
        assert resident_bytes(agent) < before + (16 << 20)
        assert len(os.listdir(f"/proc/{agent}/fd")) < 200
        finished = job.finish()
    assert finished.code == 0, finished.err
    for text in ATTACKS.values():
        assert finished.err.count(f"a process of user {os.getuid()} (pid {os.getpid()}) {text}") == 1, finished.err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_heard(tmp_path: Path) -> None:
    with elastic_job(tmp_path) as job:
        name = find_name(job.running.process.pid)
        pid = os.fork()
        if pid == 0:
            os.setuid(NOBODY)
            try:
                with connect(name) as sock:
                    os._exit(0 if sock.recv(100) == b"" else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        job.kill(1)
        job.wait_joined(1, 1)
        job.wait_generation(1, 3)
        finished = job.finish()
    assert finished.code == 0
    assert f"a process of user {NOBODY} (pid {pid}) has connected to the job of another user" in finished.err
