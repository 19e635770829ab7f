"""A `JobSpec` is the first host's description of the job for hosts that join: all that `phalanx join` needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx._job.agent.environment import plan_environment
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget, Kind
from phalanx._job.output.streams import Streams

KEY = "launch/job_spec"  # the key of the job spec in the coordinator's store
VERSION = 4

# The first host passes these variables on unasked; a host's own values replace them.
_PASSED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "GLIBC_TUNABLES")
_PASSED_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_")
_OF_EVERY_HOST = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")  # addresses
_OF_ONE_HOST = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "TORCH_HOME")


@dataclass(frozen=True)
class JobSpec:
    """The job as the first host was asked for it.

    `endpoints` is where it began: the command of a host that was in it looks for it there when it is started again.
    """

    kind: Kind
    name: str
    arguments: tuple[str, ...]
    folder: str
    nproc: str
    run_id: str
    min_nodes: int
    max_nodes: int
    host_timeout_s: float
    join_timeout_s: float
    last_call_s: float
    role: str
    signals_to_handle: str
    log_dir: str | None
    report: str | None
    metrics: tuple[str, int] | None  # where another host can serve its own, too
    redirects: Streams
    tee: Streams
    shown_ranks: tuple[int, ...] | None
    grace_s: float
    exit_timeout_s: float | None
    evict_after_s: float | None
    affinity: bool
    preload: bool
    max_restarts: int | None
    local_rank_argument: bool
    ranks_per_gpu: int | None
    env: dict[str, str]  # what --env names on the first host
    passed: dict[str, str]  # the variables that the first host passes on by default
    endpoints: tuple[str, ...]
    version: int = VERSION

    @classmethod
    def of(
        cls, settings: Settings, run_id: str, environment: Mapping[str, str], endpoints: tuple[str, ...] = ()
    ) -> JobSpec:
        """Return the spec of the job that was asked for here, whose ranks inherit `environment`."""
        rendezvous = settings.rendezvous
        assert rendezvous is not None
        target = settings.target
        return cls(
            target.kind, target.name, target.arguments, os.getcwd(), settings.nproc, run_id, rendezvous.min_nodes,
            rendezvous.max_nodes, rendezvous.host_timeout_s, rendezvous.join_timeout_s, rendezvous.last_call_s,
            settings.role, settings.signals_to_handle, settings.log_dir, settings.report,
            choose_metrics(settings.metrics), settings.redirects, settings.tee, settings.shown_ranks,
            settings.grace_s, settings.exit_timeout_s, settings.evict_after_s,
            settings.affinity, settings.preload, settings.max_restarts, settings.local_rank_argument,
            settings.ranks_per_gpu,
            {name: environment[name] for name in settings.env if name in environment},
            {name: value for name, value in environment.items() if is_passed(name)}, endpoints,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSpec:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: another version of Phalanx has written them.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["version"] != VERSION:
                raise ValueError
            for name in ("redirects", "tee"):
                streams = fields[name]
                fields[name] = Streams(streams["all"], tuple((int(a), int(b)) for a, b in streams["by_rank"]))
            fields["arguments"], fields["endpoints"] = tuple(fields["arguments"]), tuple(fields["endpoints"])
            fields["metrics"] = None if fields["metrics"] is None else tuple(fields["metrics"])
            fields["shown_ranks"] = None if fields["shown_ranks"] is None else tuple(fields["shown_ranks"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError):
            raise ValueError("the first host runs another version of Phalanx. Install the same one on all") from None

    def plan_environment(self, own: Mapping[str, str], env: Mapping[str, str | None]) -> dict[str, str]:
        """Return the environment of the ranks on a host with the environment `own` and its own --env `env`."""
        return plan_environment(own, env, self.env, self.passed)

    def is_asked_for_by(self, settings: Settings) -> bool:
        """Return whether a command with these settings asks for this job."""
        is_named = settings.run_id in ("", self.run_id)
        return is_named and settings.target == JobTarget(self.kind, self.name, self.arguments)

    def to_settings(self, own: Settings) -> Settings:
        """Return the job as it runs on a host where only `phalanx join` was typed, with `own`'s facts of this host."""
        return replace(
            own,
            target=JobTarget(self.kind, self.name, self.arguments),
            nproc=own.nproc or self.nproc,
            log_dir=own.log_dir or self.log_dir,
            report=own.report or self.report,
            metrics=own.metrics or self.metrics,
            needs_metrics=own.metrics is not None,
            role=own.role or self.role,
            signals_to_handle=self.signals_to_handle,
            redirects=self.redirects,
            tee=self.tee,
            shown_ranks=self.shown_ranks,
            grace_s=self.grace_s,
            exit_timeout_s=self.exit_timeout_s,
            evict_after_s=self.evict_after_s,
            affinity=self.affinity and own.affinity,
            preload=self.preload,
            max_restarts=self.max_restarts,
            local_rank_argument=self.local_rank_argument,
            ranks_per_gpu=own.ranks_per_gpu or self.ranks_per_gpu,
        )


def choose_metrics(metrics: tuple[str, int] | None) -> tuple[str, int] | None:
    """Return where each host serves its numbers, if the first does at `metrics`; None if that is its address alone."""
    return metrics if metrics is not None and metrics[0] in _OF_EVERY_HOST else None


def is_passed(name: str) -> bool:
    """Return whether the first host passes the variable `name` on to the other hosts."""
    return (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and name not in _OF_ONE_HOST


def name_own_address(address: str, interface: str) -> dict[str, str]:
    """Return variables by which ranks and the engines between hosts use the address that was tried."""
    told = {"PHALANX_ADDRESS": address}
    if interface:
        told |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return told
