"""Collect the facts that a host reports before the job starts: versions, addresses, script, problems."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import phalanx
from phalanx._base.host_addresses import own_addresses
from phalanx._job.agent.environment import plan_environment
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.target import JobTarget, read_source
from phalanx._job.launch.command_line import parse
from phalanx._job.launch.plan_job import plan_job
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class Facts:
    """`Facts` are a host's report. `machine` identifies the machine, whatever its name.

    `script` is a digest of the script's source; empty if the host does not have the source. `addresses` are those at
    which others may reach the host, the likeliest first: address, interface, and Mbit/s (0 if unknown). `problem` is
    the reason why the job cannot run there; `has_folder` is whether the job's working directory exists there.
    """

    phalanx: str
    python: str
    torch: str
    machine: str
    script: str = ""
    addresses: tuple[tuple[str, str, int], ...] = ()
    problem: str = ""
    has_folder: bool = True

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Facts:
        """Return the facts in a message.

        Raises:
            KeyError, TypeError, ValueError: the message does not contain valid facts.
        """
        facts = cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
        return replace(facts, addresses=tuple((str(at), str(on), int(rate)) for at, on, rate in facts.addresses))


def collect_facts(request: Mapping[str, Any], environ: dict[str, str]) -> tuple[Facts, JobPlan | None]:
    """Return the facts, and the plan of the job on this host; None instead of a plan if the job cannot run.

    Changes to the job's working directory, and adds to `environ` the variables of `request` that are missing there.
    """
    facts = Facts(
        phalanx.__version__, platform.python_version(), _find_torch(), _identify_machine(),
        addresses=tuple((own.address, own.interface, _find_rate(own.interface)) for own in own_addresses()
                        if own.is_global),
    )  # fmt: skip
    if request["phalanx"] != phalanx.__version__:
        return facts, None
    try:
        os.chdir(request["folder"])
    except OSError as error:
        problem = f"the folder {request['folder']} cannot be entered: {error.strerror}"
        return replace(facts, problem=problem, has_folder=False), None
    for name, value in request["passed"].items():
        environ.setdefault(name, value)
    try:
        settings = parse(request["words"], environ)
        assert settings is not None, "the starter has handled --help"
        settings = replace(settings, env=request["env"], nproc_per_node=request["slots"] or settings.nproc_per_node)
        facts = replace(facts, script=digest_source(settings.target))
        return facts, plan_job(settings, environ, plan_environment(environ, settings.env))
    except LaunchError as error:
        return replace(facts, problem=str(error).replace("phalanx run: ", "")), None


def digest_source(target: JobTarget) -> str:
    """Return a digest of the target's source; empty if there is no source in the working directory."""
    source = read_source(target)
    return hashlib.blake2b(source, digest_size=8).hexdigest() if source else ""


def _find_torch() -> str:
    """Return the installed version of torch without importing it; empty if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _identify_machine() -> str:
    """Return an id that differs between machines, and between containers with different network namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _find_rate(interface: str) -> int:
    """Return the rate of an interface in Mbit/s, as reported by its driver; 0 if unknown."""
    try:
        return max(0, int(Path("/sys/class/net", interface, "speed").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return 0
