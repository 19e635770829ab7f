"""The command of each host of a job, and how they end."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from tests.system.phalanx_command import Finished, Running, start

from phalanx._comm.control.key import Key
from phalanx.testing.namespaces import Host

_PORT = "29477"


@contextlib.contextmanager
def commands(machines: list[Host], *lines: tuple[str, ...], key: Key | None = None) -> Iterator[list[Running]]:
    """One `phalanx` command on each host, all with the job's key; at the end nothing of them is left."""
    home = str(os.environ.get("TMPDIR", "/tmp"))
    environ = {"PHALANX_KEY": str(key or Key(bytes(32))), "XDG_CONFIG_HOME": home}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(start(*line, env=environ, before=machine.command, stderr=subprocess.STDOUT))
            for machine, line in zip(machines, lines, strict=True)
        ]


def numbered(machines: list[Host], *options: str, script: tuple[str, ...], nproc: str = "2") -> list[tuple[str, ...]]:
    """The same line on each host, but for its number, as torchrun's static rendezvous has it."""
    size = str(len(machines))
    where = ("--master-addr", machines[0].address, "--master-port", _PORT)
    return [
        ("run", "--nnodes", size, "--node-rank", str(n), *where, "--nproc-per-node", nproc, *options, *script)
        for n in range(len(machines))
    ]


def finish(jobs: list[Running]) -> list[Finished]:
    """How all ended; nothing of them is left on any host."""
    finished = [job.finish() for job in jobs]
    assert [job.survivors() for job in jobs] == [[]] * len(jobs)
    return finished
