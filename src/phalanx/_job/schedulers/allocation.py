"""Describe the job in which a scheduler has started this command."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LaunchError

_PORTS = range(20000, 30000)  # below the usual range of ephemeral ports
_NUM_CANDIDATES = 8
_STEP = 1009  # prime and large, so that the candidates of two jobs rarely coincide


def read_port(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the port in the variable `name`.

    Raises:
        LaunchError: the value is not a port.
    """
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 0xFFFF):
        raise LaunchError(f"phalanx run: {name}={text} in the environment: must be a port, 1 to 65535", exit_code=2)
    return int(text)


@dataclass(frozen=True)
class Allocation:
    """An `Allocation` means that this command is node `node` of the `num_nodes` nodes of a job.

    Arguments:
        job: identifies the job among a user's jobs on these hosts.
        variables: the names of the scheduler's variables that were read.
        first_host: the host of node 0; empty if unknown.
        port: the port of the rendezvous; 0 if none was chosen.
        local_node, num_local_nodes: the node's number on this host, and the number of nodes here.
        needs_mpi_broadcast: MPI must broadcast the first host, or the job's name, because no variable has it.
        hint: how to start the command on every host, if it was started on only one host.
    """

    scheduler: str
    node: int
    num_nodes: int
    job: str
    variables: tuple[str, ...]
    first_host: str = ""
    port: int = 0
    local_node: int = 0
    num_local_nodes: int = 1
    needs_mpi_broadcast: bool = False
    hint: str = ""

    @property
    def is_on_one_host(self) -> bool:
        """Return whether all nodes are on this host, according to the scheduler."""
        return self.num_local_nodes == self.num_nodes

    @property
    def ports(self) -> tuple[int, ...]:
        """Return the ports at which node 0 tries to listen, in order: the chosen one, or a few from the job's name."""
        if self.port:
            return (self.port,)
        first = zlib.crc32(self.job.encode())
        return tuple(_PORTS[(first + i * _STEP) % len(_PORTS)] for i in range(_NUM_CANDIDATES))

    def describe(self) -> str:
        """Return a line such as `Slurm: node 1 of 2 of job slurm-17.0 (SLURM_PROCID, …)`."""
        return f"{self.scheduler}: node {self.node} of {self.num_nodes} of job {self.job} ({', '.join(self.variables)})"
