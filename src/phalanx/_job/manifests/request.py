"""A `JobRequest` is the job that a manifest submits: the command, the nodes, and the resources of each node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._job.agent.settings import USAGE_EXIT_CODE, Settings
from phalanx._job.launch.command_line import parse, split_options
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class JobRequest:
    """A `JobRequest` is a job of `nodes` nodes with resources for each; 0 and "" leave them to the scheduler.

    `settings`: the settings that `phalanx run` reads from `words`.
    """

    words: tuple[str, ...]
    settings: Settings
    nodes: int
    name: str
    cpus: int = 0
    gpus: int = 0
    memory: str = ""

    @property
    def run_words(self) -> tuple[str, ...]:
        """Return the words that follow `phalanx run` in the file."""
        if self.gpus or not self.cpus or self.settings.nproc_per_node != "auto":
            return self.words
        # A CPU limit hides no cores: `phalanx run` would count all cores of the machine.
        return (f"--nproc-per-node={self.cpus}", *self.words)

    @property
    def witness(self) -> str:
        """Return the value of --witness; "" without that option."""
        return "" if self.settings.rendezvous is None else self.settings.rendezvous.witness


def read_words(words: Sequence[str], nodes: int) -> Settings:
    """Return the settings that `phalanx run` reads from the words on `nodes` nodes.

    Raises:
        LaunchError: `phalanx run` would refuse the words, or they set a value that the scheduler decides.
    """
    # The file sets these options; a second value would contradict it.
    decided = ("nnodes", "node-rank", "rdzv-endpoint", "master-addr", "master-port", "standalone")
    taken, _ = split_options(words, decided)
    for name in taken:
        raise LaunchError(
            f"phalanx manifest: --{name}: leave it out. The number of nodes is --nodes, before the command; the nodes "
            "find their numbers and the rendezvous themselves.",
            exit_code=USAGE_EXIT_CODE,
        )
    settings = parse(words, {"PET_NNODES": str(nodes)})
    if settings is None:
        raise LaunchError("phalanx manifest: nothing to run, only --help", exit_code=USAGE_EXIT_CODE)
    return settings


def quote(words: Sequence[str]) -> str:
    """Return the words quoted for a shell."""
    return " ".join(shlex.quote(word) for word in words)
