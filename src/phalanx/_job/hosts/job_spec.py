"""A `JobSpec` is the first host's description of the job for other hosts: everything that `phalanx join` needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx._job.agent.environment import plan_environment
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.output.logs import Streams

KEY = "launch/job_spec"  # the key of the job spec in the coordinator's store
VERSION = 5

# The first host passes these variables on by default; a host's own values override them.
_PASSED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "GLIBC_TUNABLES")
_PASSED_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_")
_OF_EVERY_HOST = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")  # addresses that every host has
_OF_ONE_HOST = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "TORCH_HOME")


@dataclass(frozen=True)
class JobSpec:
    """A `JobSpec` is the job as it was requested on the first host.

    Arguments:
        settings: the settings that apply to all hosts, without the rendezvous.
        rendezvous: the number of hosts and the time limits.
        folder: the working directory on the first host.
        env: the variables named by --env on the first host.
        passed: the variables that the first host passes on by default.
        endpoints: the coordinator's endpoints when the job began. A restarted host looks for the job there.
    """

    settings: Settings
    rendezvous: Rendezvous
    folder: str
    env: Mapping[str, str]
    passed: Mapping[str, str]
    endpoints: tuple[str, ...]

    @classmethod
    def of(
        cls, settings: Settings, run_id: str, environment: Mapping[str, str], endpoints: tuple[str, ...] = ()
    ) -> JobSpec:
        """Return the spec of the job that was requested on this host, whose ranks inherit `environment`."""
        own = settings.rendezvous
        assert own is not None
        return cls(
            replace(
                settings,
                run_id=run_id,
                metrics=metrics_address(settings.metrics),
                key_file=None,
                env={},
                rendezvous=None,
                share=(0, 1),
            ),
            Rendezvous(
                min_nodes=own.min_nodes,
                max_nodes=own.max_nodes,
                join_timeout_s=own.join_timeout_s,
                last_call_s=own.last_call_s,
                host_timeout_s=own.host_timeout_s,
            ),
            folder=os.getcwd(),
            env={name: environment[name] for name in settings.env if name in environment},
            passed={name: value for name, value in environment.items() if is_passed_on(name)},
            endpoints=endpoints,
        )

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSpec:
        """Decode the result of `to_bytes`.

        Raises:
            ValueError: the data was written by another version of Phalanx.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("version") != VERSION:
                raise ValueError
            settings = _to_tuples(fields.pop("settings"))
            for name in ("redirects", "tee"):
                settings[name] = Streams(**_to_tuples(settings[name]))
            settings["target"] = JobTarget(**_to_tuples(settings["target"]))
            return cls(Settings(**settings), Rendezvous(**_to_tuples(fields.pop("rendezvous"))), **_to_tuples(fields))
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                "the first host runs another version of Phalanx. Install the same version on all hosts"
            ) from None

    def plan_environment(self, own: Mapping[str, str], env: Mapping[str, str | None]) -> dict[str, str]:
        """Return the ranks' environment on a host whose environment is `own` and whose own --env options are `env`."""
        return plan_environment(own, env, self.env, self.passed)

    def is_requested_by(self, settings: Settings) -> bool:
        """Return whether a command with these settings requests this job."""
        is_named = settings.run_id in ("", self.settings.run_id)
        return is_named and settings.target == self.settings.target

    def to_settings(self, own: Settings) -> Settings:
        """Return the settings of the job on a host where `phalanx join` was run with the settings `own`."""
        first = self.settings
        return replace(
            first,
            nproc_per_node=own.nproc_per_node or first.nproc_per_node,
            ranks_per_gpu=own.ranks_per_gpu or first.ranks_per_gpu,
            log_dir=own.log_dir or first.log_dir,
            report=own.report or first.report,
            metrics=own.metrics or first.metrics,
            needs_metrics=own.metrics is not None,
            role=own.role or first.role,
            affinity=first.affinity and own.affinity,
            key_file=own.key_file,
            env=own.env,
            rendezvous=own.rendezvous,
        )


def _to_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataclass's fields as decoded from JSON, with each list converted back to a tuple."""
    return {name: _to_tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _to_tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_to_tuple(value) if isinstance(value, list) else value for value in values)


def metrics_address(metrics: tuple[str, int] | None) -> tuple[str, int] | None:
    """Return the address and port at which other hosts serve metrics if the first host serves them at `metrics`.

    Return None if only the first host has that address.
    """
    return metrics if metrics is not None and metrics[0] in _OF_EVERY_HOST else None


def is_passed_on(name: str) -> bool:
    """Return whether the first host passes the variable `name` on to the other hosts."""
    return (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and name not in _OF_ONE_HOST


def own_address_variables(address: str, interface: str) -> dict[str, str]:
    """Return the variables that make ranks, Gloo and NCCL use `address`, which other hosts can reach."""
    variables = {"PHALANX_ADDRESS": address}
    if interface:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return variables
