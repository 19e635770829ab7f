"""An elastic job whose leader is chosen with the vote of a witness."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.system.elastic_hosts import Cluster
from tests.system.phalanx_command import Running, start
from tests.system.standbys import WAITS

from phalanx._comm.control.key import Key
from phalanx.testing.namespaces import Host, hosts

_KEY = Key(bytes(32))


_PORT = 29481


def start_coordinator(machine: Host) -> contextlib.AbstractContextManager[Running]:
    """The command that keeps the vote."""
    line = ("coordinator", "--bind", f"{machine.address}:{_PORT}")
    return start(*line, env={"PHALANX_KEY": str(_KEY)}, before=machine.command, stderr=subprocess.STDOUT)


def make_cluster(machines: list[Host], folder: Path, scheme: str = "") -> Cluster:
    """A cluster whose last machine is the witness's."""
    options = ("--no-preload", "--host-timeout", "3", "--witness", f"{scheme}{machines[-1].address}:{_PORT}")
    return Cluster(machines, folder, f"1:{len(machines) - 1}", WAITS, options)


@contextlib.contextmanager
def witnessed(folder: Path, *sizes: int, late: bool = False) -> Iterator[tuple[Cluster, Running]]:
    """Hosts with so many ranks each, and a witness on one more; `late`: it is started once the ranks run."""
    with hosts(len(sizes) + 1) as machines, contextlib.ExitStack() as stack:
        witness = machines[-1]
        made = make_cluster(machines, folder)
        stack.callback(made.close)
        if not late:
            running = stack.enter_context(start_coordinator(witness))
            running.read_until("coordinator: listening")
        for number, size in enumerate(sizes):
            made.start(number, size)
            if number:
                made.wait_connected(number)
        made.first.wait_joined(0, *range(sum(sizes)))
        if late:
            made.wait_for(0, "does not vote")
            running = stack.enter_context(start_coordinator(witness))
            made.wait_for(0, f"the witness at {witness.address}:{_PORT} votes")
        yield made, running
