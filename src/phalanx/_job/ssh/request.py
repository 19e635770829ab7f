"""Turn the command line of `phalanx run --hosts …` into a `Request`: the hosts, and the message to each."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import phalanx
from phalanx._comm.control.key_file import FILE_VARIABLE, VARIABLE
from phalanx._job.agent.environment import RANK_VARIABLES
from phalanx._job.agent.plan import read_terminal_columns
from phalanx._job.agent.settings import Settings, refuse
from phalanx._job.hosts.job_spec import is_passed_on
from phalanx._job.launch.command_line import SSH_OPTIONS, read_settings, split_options
from phalanx._job.ssh.host_list import HostEntry, parse_hostfile, parse_hosts

_CONTRADICTING = {
    "standalone": "a standalone job runs on one host",
    "node-rank": "hosts are numbered in the order of the list",
    "rdzv-endpoint": "the hosts connect to the first one; --master-addr chooses one of its addresses",
    "rdzv-backend": "the hosts connect to the first one; --master-addr chooses one of its addresses",
    "local-addr": "all hosts get the option, but an address belongs to one; --master-addr chooses the first host's",
}
_PLACE = ("master-addr", "master-port")
_PASSED_PREFIXES = ("PHALANX_", "NCCL_", "GLOO_", "OMP_", "PET_")
_PASSED = ("CUDA_VISIBLE_DEVICES", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
_OF_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR")
_NOT_PASSED = (
    *RANK_VARIABLES, VARIABLE, FILE_VARIABLE, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA",
    "NCCL_TOPO_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A `Request` is the job that a command line requests.

    Arguments:
        hosts: the hosts; the first one leads.
        words: the command line that each host parses.
        settings: the same words, parsed here.
        folder: the job's working directory, on every host.
        env: the variables of --env, with this host's values.
        passed: this host's variables, as defaults for hosts that lack them.
        ssh: the words of the ssh command.
        python: the interpreter on the other hosts, a path or a name.
        address, port: where the first host listens, if the user has set this.
        detach: whether the job outlives the terminal.
    """

    hosts: tuple[HostEntry, ...]
    words: tuple[str, ...]
    settings: Settings
    folder: str
    env: Mapping[str, str]
    passed: Mapping[str, str]
    ssh: tuple[str, ...]
    python: str
    address: str
    port: int
    detach: bool

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of hosts may change."""
        rendezvous = self.settings.rendezvous
        return rendezvous is not None and rendezvous.min_nodes != rendezvous.max_nodes


def read_request(words: Sequence[str], environ: Mapping[str, str], folder: str) -> Request | None:
    """Return the job that `words` request, started in `folder`; None if the words ask for help.

    Raises:
        LaunchError: the command line is invalid; the message lists every problem.
    """
    problems: list[str] = []
    taken, rest = split_options(words, (*SSH_OPTIONS, *_PLACE))
    hosts = _read_hosts(taken, problems)
    given, rest = split_options(rest, _CONTRADICTING)
    given |= {name: "" for name in _CONTRADICTING if environ.get(f"PET_{name.replace('-', '_').upper()}")}
    problems += [f"--hosts and --{name}: {_CONTRADICTING[name]}. Leave out one of the two" for name in given]
    command = read_ssh(taken.get("ssh"), problems)
    python = read_python(taken.get("remote-python"), problems)
    remote_folder = taken.get("remote-dir", folder)
    if not os.path.isabs(remote_folder):
        problems.append(f"--remote-dir {remote_folder!r}: must be an absolute path")
    target_words = [f"--nnodes={len(hosts) or 1}", *rest]
    place_words = [f"--{name}={taken[name]}" for name in _PLACE if name in taken]
    num_problems = len(problems)
    settings = read_settings([*place_words, *target_words], environ, problems)
    if settings is None:
        return None
    if settings.target.name.startswith(","):
        blank = f"--hosts {taken.get('hosts')} {settings.target.name}"
        problems.append(f"{blank}: a space ends the list. Write it without spaces, or in quotes")
    elif hosts and len(problems) == num_problems:
        _check_settings(settings, len(hosts), "detach" in taken, problems)
    refuse(problems)
    env = {name: environ.get(name) if value is None else value for name, value in settings.env.items()}
    return Request(
        hosts=tuple(hosts),
        words=tuple(target_words),
        settings=settings,
        folder=remote_folder,
        env={name: value for name, value in env.items() if value is not None},
        passed={name: value for name, value in environ.items() if _is_passed(name)},
        ssh=tuple(command),
        python=python,
        address=taken.get("master-addr", ""),
        port=int(taken.get("master-port", "0")),
        detach="detach" in taken,
    )


def read_ssh(text: str | None, problems: list[str]) -> list[str]:
    """Return the words of the ssh command, by default `ssh`; append errors to `problems`."""
    try:
        words = shlex.split("ssh" if text is None else text)
    except ValueError as error:
        problems.append(f"--ssh {text!r}: {error}")
        return []
    if not words or shutil.which(words[0]) is None:
        problems.append(f"--ssh {'ssh' if text is None else text!r}: no such command here. Install OpenSSH's client")
    return words


def read_python(text: str | None, problems: list[str]) -> str:
    """Return the Python on the other hosts, by default the path of this one; append errors to `problems`."""
    python = sys.executable if text is None else text
    if python.startswith(("~", "-")) or not python or "\n" in python:
        problems.append(f"--remote-python {python!r}: must be an absolute path, or a name for the login shell's PATH")
    return python


def _read_hosts(taken: Mapping[str, str], problems: list[str]) -> list[HostEntry]:
    if "hosts" in taken and "hostfile" in taken:
        problems.append("--hosts and --hostfile: give one of the two")
        return []
    if "hosts" in taken:
        return parse_hosts(taken["hosts"], problems)
    if "hostfile" not in taken:
        problems.append(f"--{next(iter(taken))}: only for a job over ssh. Also give --hosts or --hostfile")
        return []
    try:
        with open(taken["hostfile"], encoding="utf-8") as file:
            return parse_hostfile(file.read(), taken["hostfile"], problems)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        problems.append(f"--hostfile {taken['hostfile']}: {reason}")
        return []


def _check_settings(settings: Settings, num_hosts: int, detach: bool, problems: list[str]) -> None:
    rendezvous = settings.rendezvous
    low, high = (rendezvous.min_nodes, rendezvous.max_nodes) if rendezvous is not None else (1, 1)
    if low == high != num_hosts:
        problems.append(f"--nnodes {high}, but {num_hosts} hosts are listed. Leave out --nnodes, or list {high}")
    elif num_hosts < low:
        problems.append(f"--nnodes {low}:{high}, but {num_hosts} hosts are listed. List at least {low}")
    if detach and settings.log_dir is None:
        problems.append("--detach: name a folder on the hosts for the output: --log-dir DIR")
    if detach and low != high and settings.max_restarts:
        problems.append(
            "--detach and --max-restarts: this command restarts the lost hosts of an elastic job, but with --detach "
            "it exits. Leave out one of the two"
        )


def _is_passed(name: str) -> bool:
    named = is_passed_on(name) or name in _PASSED or name.startswith(_PASSED_PREFIXES)
    return (named and name not in _NOT_PASSED) or (name in _OF_TERMINAL and read_terminal_columns() > 0)


def make_check(request: Request, entry: HostEntry, secret: str) -> dict[str, Any]:
    """Return the first message to the host `entry`: the whole job except the key and the endpoint.

    `secret` is for the first host, which answers the reachability tests of hosts that have the secret.
    """
    return {
        "phalanx": phalanx.__version__,
        "words": list(request.words),
        "folder": request.folder,
        "slots": entry.slots,
        "env": dict(request.env),
        "passed": dict(request.passed),
        "secret": secret,
        "log": f"host-{request.hosts.index(entry)}.log" if request.detach else "",
    }
