"""Parse the hosts of `--hosts` and `--hostfile`. The functions are pure, and report all problems at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<slots>[^:]*))?")
_PLAIN = re.compile(r"[A-Za-z0-9_.@%:+\-]+")


@dataclass(frozen=True)
class HostEntry:
    """A `HostEntry` is a `destination` of ssh, [USER@]HOST, with its number of ranks; "": that of --nproc-per-node."""

    destination: str
    slots: str = ""

    @property
    def host(self) -> str:
        """Return the host without the user."""
        return self.destination.rpartition("@")[2]


def parse_hosts(text: str, problems: list[str]) -> list[HostEntry]:
    """Return the hosts in a list such as `a,b:4,user@c`; append errors to `problems`."""
    if text.rstrip().endswith(","):
        problems.append(
            f"--hosts {text}: the list ends with a comma. Write it without spaces, or in quotes: 'a:2, b:2'"
        )
        return []
    entries = [parse_host(part.strip(), "--hosts", problems) for part in text.split(",")]
    return _refuse_repetitions([entry for entry in entries if entry is not None], "--hosts", problems)


def parse_hostfile(text: str, name: str, problems: list[str]) -> list[HostEntry]:
    """Return the hosts in an MPI or DeepSpeed hostfile: lines `host slots=N` or `host:N`, comments, blank lines."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        where = f"--hostfile {name}, line {number}"
        if not words:
            continue
        entry = parse_host(words[0], where, problems)
        slots = ""
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "slots":
                problems.append(f"{where}: {word!r} is not understood. A line is: HOST slots=N")
            elif _check_slots(value, where, problems):
                slots = value
        if entry is not None:
            entries.append(HostEntry(entry.destination, slots or entry.slots))
    if not entries and not problems:
        problems.append(f"--hostfile {name}: it lists no host. A line is: HOST slots=N")
    return _refuse_repetitions(entries, f"--hostfile {name}", problems)


def parse_host(text: str, where: str, problems: list[str]) -> HostEntry | None:
    """Return one host; append errors, which begin with `where`, to `problems`."""
    user, at, rest = text.rpartition("@")
    match = _HOST.fullmatch(rest)
    host = match["host"].removeprefix("[").removesuffix("]") if match else ""
    destination = f"{user}{at}{host}"
    if not host or (at and not user) or not _PLAIN.fullmatch(destination) or destination.startswith("-"):
        advice = "must be HOST, HOST:RANKS or USER@HOST, with brackets around an IPv6 address"
        if "://" in text:
            advice = "give the port of sshd in ~/.ssh/config, or for all hosts: --ssh 'ssh -p 2222'"
        problems.append(f"{where}: {text!r}: {advice}")
        return None
    assert match is not None
    slots = match["slots"]
    if slots is not None and not _check_slots(slots, f"{where}: {text}", problems):
        return None
    return HostEntry(destination, slots or "")


def _check_slots(text: str, where: str, problems: list[str]) -> bool:
    if text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) > 0:
        return True
    problems.append(f"{where}: the number of ranks must be at least 1, got {text!r}")
    return False


def _refuse_repetitions(entries: Sequence[HostEntry], where: str, problems: list[str]) -> list[HostEntry]:
    hosts = [entry.host for entry in entries]
    for host in dict.fromkeys(host for host in hosts if hosts.count(host) > 1):
        problems.append(f"{where}: {host} is listed {hosts.count(host)} times. List it once, with its ranks: {host}:N")
    return list(entries)
