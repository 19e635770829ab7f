"""A job of two hosts, and a third host that has no key and opens every connection that it can get."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.phalanx_command import start, write_script
from tests.system.test_run_hosts import finish, numbered

from phalanx.coordination.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_OPEN_FILES = 1024  # the usual limit
_TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("phalanx")
x = torch.ones(4)
for step in range(200):
    dist.all_reduce(x)
    x /= dist.get_world_size()
    time.sleep(0.02)
print("sum", x.sum().item(), flush=True)
dist.destroy_process_group()
"""
_STRANGERS = """
import resource, socket, sys, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kept = []
while True:  # until somebody listens
    try:
        kept.append(socket.create_connection((address, port)))
        break
    except OSError:
        time.sleep(0.05)
while len(kept) < count:
    one = socket.socket()
    one.settimeout(5)
    try:
        one.connect((address, port))
        one.send(b"\\xff")
    except OSError:
        pass
    kept.append(one)
print("here", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def strangers(machine: Host, address: str, port: str, count: int) -> Iterator[None]:
    """So many connections of one byte each from `machine`, which stay."""
    line = (*machine.command, sys.executable, "-c", _STRANGERS, address, port, str(count))
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("comes", ["before the second host", "while they train"])
def test_connections_of_strangers_end_no_job_and_keep_no_host_out(tmp_path: Path, comes: str) -> None:
    script = write_script(tmp_path, _TRAIN)
    environ = {"PHALANX_KEY": str(Key(bytes(32))), "XDG_CONFIG_HOME": os.environ.get("TMPDIR", "/tmp")}
    limit = ("prlimit", f"--nofile={_OPEN_FILES}:{_OPEN_FILES}")
    with hosts(3) as machines, contextlib.ExitStack() as stack:
        lines = numbered(machines[:2], script=(script,), nproc="1")
        jobs = []

        def begin(number: int) -> None:
            before = (*machines[number].command, *limit)
            jobs.append(
                stack.enter_context(start(*lines[number], env=environ, before=before, stderr=subprocess.STDOUT))
            )

        begin(0)
        if comes == "while they train":
            begin(1)
            jobs[0].read_until("2 hosts")
        port = lines[0][lines[0].index("--master-port") + 1]
        stack.enter_context(strangers(machines[2], machines[0].address, port, 2 * _OPEN_FILES))
        if len(jobs) == 1:
            begin(1)
        first, second = finish(jobs)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "sum 4.0" in first.out
    assert f"refused a connection from {machines[2].address}" in first.out
