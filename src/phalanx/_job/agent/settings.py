"""`Settings` are the parsed options of `phalanx run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx._job.agent.target import JobTarget
from phalanx._job.output.logs import NO_STREAMS, Streams
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from phalanx._job.coordinator.rendezvous import Rendezvous

USAGE_EXIT_CODE = 2


@dataclass(frozen=True)
class Settings:
    """`Settings` are the parsed options of a job. A field that corresponds to an option has the option's name.

    Arguments:
        nproc_per_node: a number, or auto, cpu or gpu.
        env: variables for the ranks of all hosts; None stands for the value in this command's environment.
        rendezvous: how the hosts find each other; None for a job on one host.
        run_id: --rdzv-id; empty if it was not given.
        local_rank_argument: whether the target gets its local rank as its first argument, as under
            torch.distributed.launch.
        share: the index of this command's share of the host's cores, and the number of shares.
        needs_metrics: whether the job fails if the metrics cannot be served, because this command requests them.
    """

    target: JobTarget
    nproc_per_node: str = "auto"
    ranks_per_gpu: int | None = None  # None: not set, which means one
    log_dir: str | None = None
    report: str | None = None
    redirects: Streams = NO_STREAMS
    tee: Streams = NO_STREAMS
    local_ranks_filter: tuple[int, ...] | None = None
    shutdown_timeout_s: float = 30.0  # torchrun's default
    exit_timeout_s: float | None = None
    evict_after_s: float | None = None
    affinity: bool = True
    preload: bool = True
    max_restarts: int | None = None  # None: no restarts; in an elastic job, replacements as long as they help
    role: str = "default"
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free port
    run_id: str = ""
    standalone: bool = False
    local_rank_argument: bool = False
    key_file: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    rendezvous: Rendezvous | None = None
    share: tuple[int, int] = (0, 1)
    log_line_prefix_template: str = ""
    metrics: tuple[str, int] | None = None  # host and port of the metrics server
    needs_metrics: bool = True
    traceback: bool = False


def refuse(problems: Sequence[str]) -> None:
    """Refuse a configuration with problems.

    Raises:
        LaunchError: there are problems; each is a line of the message, and begins with the command.
    """
    if problems:
        raise LaunchError("\n".join(f"phalanx run: {problem}" for problem in problems), exit_code=USAGE_EXIT_CODE)
