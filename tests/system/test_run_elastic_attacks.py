"""The socket by which ranks and agent speak is attacked while a rank is lost: it goes on, and says by whom, once."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from tests.system.elastic_job import elastic_job

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
