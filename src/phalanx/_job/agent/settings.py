"""`Settings` are a job as requested: the parsed options of `phalanx run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx._job.agent.target import JobTarget
from phalanx._job.output.streams import NO_STREAMS, Streams

if TYPE_CHECKING:
    from phalanx._job.coordinator.rendezvous import Rendezvous

USAGE_EXIT_CODE = 2


@dataclass(frozen=True)
class Settings:
    """`Settings` is a job as asked for. `nproc` is a number or a word: auto, cpu, gpu. `rendezvous`: None on one host.

    `run_id` is empty where none was given. `env` are variables for the ranks of all hosts: a value, or None for the one
    here. `local_rank_argument`: the target gets its local rank as its first argument,
    as under torch.distributed.launch.
    """

    target: JobTarget
    nproc: str = "auto"
    ranks_per_gpu: int | None = None  # None: not set, which means one
    log_dir: str | None = None
    report: str | None = None
    redirects: Streams = NO_STREAMS
    tee: Streams = NO_STREAMS
    shown_ranks: tuple[int, ...] | None = None
    grace_s: float = 30.0  # torchrun's
    exit_timeout_s: float | None = None
    evict_after_s: float | None = None
    affinity: bool = True
    preload: bool = True
    max_restarts: int | None = None  # None: none of all ranks, and as many replacements as an elastic job makes use of
    role: str = "default"
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    run_id: str = ""
    standalone: bool = False
    local_rank_argument: bool = False
    key_file: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    rendezvous: Rendezvous | None = None
    share: tuple[int, int] = (0, 1)  # which part of this host's cores this command uses, and how many parts there are
    log_line_prefix_template: str = ""
    metrics: tuple[str, int] | None = None  # where the job's numbers are served: a host and a port
    needs_metrics: bool = True  # whether this command ends if they cannot be served: its own words ask for them
    traceback: bool = False  # show the stack traces also of ranks that Ctrl-C has ended
    completion: str = ""  # a shell: print its completion script, and run nothing
