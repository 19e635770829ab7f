"""Build the ssh command that runs Python on a host; run a `phalanx` command there: `phalanx top --host a`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from phalanx._job.agent.settings import USAGE_EXIT_CODE
from phalanx._job.ssh.host_list import parse_host
from phalanx._job.ssh.request import read_python, read_ssh
from phalanx.errors import LaunchError


def exec_on_host(host: str, words: Sequence[str], *, ssh: str | None = None, python: str | None = None) -> NoReturn:
    """Replace this process with ssh, which runs `phalanx WORDS` on `host`; the exit code is the remote command's.

    If this process has a terminal, the remote command gets one, too, and so ends when the connection breaks. Otherwise
    the remote command's stdin is empty, because the stdin of this process may belong to a script.

    Raises:
        LaunchError: the arguments are invalid; the message lists every problem.
    """
    problems: list[str] = []
    ssh_words = read_ssh(ssh, problems)
    python = read_python(python, problems)
    entry = parse_host(host, "--host", problems)
    if entry is not None and entry.slots:
        problems.append(f"--host {host}: it has no number of ranks. For the port of sshd: --ssh 'ssh -p {entry.slots}'")
    if problems or entry is None:
        name = f"phalanx {words[0]}"
        raise LaunchError("\n".join(f"{name}: {problem}" for problem in problems), exit_code=USAGE_EXIT_CODE)
    options = ("-t",) if sys.stdin.isatty() and sys.stdout.isatty() else ("-T", "-n")
    command = make_command(ssh_words, options, entry.destination, [python, "-m", "phalanx", *words])
    os.execvp(command[0], command)


def make_command(ssh: Sequence[str], options: Sequence[str], destination: str, words: Sequence[str]) -> list[str]:
    """Return the ssh command that runs `words`, which begin with a Python, under any login shell (bash, fish, tcsh).

    Shells differ in quoting, so the words are encoded, and sh decodes them. The options in `ssh` come first.
    """
    python = shlex.quote(words[0])
    missing = f"phalanx: {words[0]}: not found on this host. Name the Python that has Phalanx: --remote-python"
    script = (
        f"cd / && command -v {python} >/dev/null || {{ echo {shlex.quote(missing)} >&2; exit 127; }}; "
        f"exec {shlex.join(words)}"  # in /, so that Python imports no module from the home directory
    )
    digits = "".join(f"\\0{byte:03o}" for byte in os.fsencode(script))
    return [*ssh, *options, "--", destination, f'exec sh -c \'eval "$(printf %b "{digits}")"\'']
