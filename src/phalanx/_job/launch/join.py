"""Execute `phalanx join HOST:PORT`; the first host sends the command, its arguments and the working directory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

from phalanx._comm.control.key_file import ask_for_key, find_key
from phalanx._job.agent.settings import USAGE_EXIT_CODE, Settings
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint, split_endpoint
from phalanx._job.hosts.first_host import JoinedJob, connect
from phalanx._job.hosts.node_plan import UNFIT
from phalanx._job.launch.command import report_errors, run_job
from phalanx._job.launch.command_line import parse
from phalanx._job.launch.options import OPTIONS
from phalanx._job.launch.plan_job import plan_job
from phalanx._job.output.standard import guarded, open_standard_descriptors, show
from phalanx.errors import AuthenticationError, LaunchError, PhalanxError

OWN_OPTIONS = (
    "nproc-per-node", "ranks-per-gpu", "key-file", "node-rank", "local-addr", "log-dir", "metrics", "role",
    "no-affinity", "env",
)  # fmt: skip
_JOIN_TIMEOUT_S = 600.0
_NOTIFY_TIMEOUT_S = 5.0


def main(words: Sequence[str]) -> int:
    """Join the job at the address in `words`; print problems on stderr; return the exit code."""
    open_standard_descriptors()
    if not words or set(words) & {"-h", "--help"}:
        guarded(lambda: print(format_help()))
        return 0 if words else USAGE_EXIT_CODE
    return report_errors(lambda: _join(*read_words(words)), "join")


def read_words(words: Sequence[str]) -> tuple[str, Settings]:
    """Return HOST:PORT, and this host's settings; options may precede or follow HOST:PORT.

    Raises:
        LaunchError: the words are invalid.
    """
    valued = {f"--{option.name}" for option in OPTIONS if option.value}
    endpoint, options, rest = "", [], list(words)
    while rest:
        word = rest.pop(0)
        name = "--" + word.partition("=")[0].lstrip("-").replace("_", "-")
        if not word.startswith("-"):
            if endpoint:
                raise LaunchError(
                    f"phalanx join: {word!r} is not an option. The command and its arguments come from the first host: "
                    f"phalanx join {endpoint}",
                    exit_code=USAGE_EXIT_CODE,
                )
            endpoint = word
            continue
        if name.removeprefix("--") not in OWN_OPTIONS:
            known = ", ".join(f"--{option}" for option in OWN_OPTIONS)
            raise LaunchError(
                f"phalanx join: {word}: the first host decides this for all hosts. Options of this host: {known}",
                exit_code=USAGE_EXIT_CODE,
            )
        options.append(word)
        if name in valued and "=" not in word and rest:
            options.append(rest.pop(0))
    try:
        host, port = split_endpoint(endpoint, 0)
    except ValueError as error:
        raise LaunchError(f"phalanx join: HOST:PORT {error}", exit_code=USAGE_EXIT_CODE) from None
    if port == 0:
        raise LaunchError(
            f"phalanx join: {endpoint}: the port is missing. The first host prints the line to type, with HOST:PORT",
            exit_code=USAGE_EXIT_CODE,
        )
    # The first host decides the number of hosts; any number above one allows --node-rank and --local-addr.
    settings = parse(["--nnodes", "9999", "--master-addr", host, "--master-port", str(port), *options, "-"])
    assert settings is not None
    assert settings.rendezvous is not None
    given = " ".join(options).replace("_", "-")
    return join_endpoint(host, port), replace(
        settings,
        nproc_per_node=settings.nproc_per_node if "--nproc-per-node" in given else "",
        role=settings.role if "--role" in given else "",
        rendezvous=Rendezvous(
            join_endpoint(host, port),
            leads=False,
            node_rank=settings.rendezvous.node_rank if "--node-rank" in given else None,
            local_addr=settings.rendezvous.local_addr,
        ),
    )


def _join(endpoint: str, settings: Settings) -> int:
    try:
        key = find_key(settings.key_file) or ask_for_key()
    except AuthenticationError as error:
        raise LaunchError(f"phalanx join: {error}", exit_code=USAGE_EXIT_CODE) from None
    if key is None:
        raise LaunchError(
            f"phalanx join: no key to join {endpoint}, and no terminal to ask for it. Copy the first host's file "
            "~/.config/phalanx/key to this host (mode 600), or name another file: --key-file, PHALANX_KEY_FILE.",
            exit_code=USAGE_EXIT_CODE,
        )
    joined = connect([endpoint], key, _JOIN_TIMEOUT_S, is_over=threading.Event().is_set, log=_print)
    job_spec = joined.job_spec
    try:
        if os.path.isdir(job_spec.folder):
            os.chdir(job_spec.folder)
        environment = job_spec.plan_environment(os.environ, settings.env)
        plan = plan_job(job_spec.to_settings(settings), os.environ, environment)
    except (LaunchError, OSError) as error:
        _notify_first_host(joined, str(error))
        where = (
            ""
            if os.path.isdir(job_spec.folder)
            else (
                f"\nThe first host runs it in {job_spec.folder}, which does not exist here; searched in {os.getcwd()}. "
                "Run `phalanx join` in the folder of the script."
            )
        )
        raise LaunchError(
            f"{error}{where}", exit_code=error.exit_code if isinstance(error, LaunchError) else 1
        ) from None
    return run_job(plan, joined)


def _notify_first_host(joined: JoinedJob, why: str) -> None:
    """Tell the first host why this host cannot run the job; the first host waits for another host."""
    with joined.client as client, contextlib.suppress(PhalanxError):
        client.timeout = _NOTIFY_TIMEOUT_S
        client.join(
            {"kind": UNFIT, "host": socket.gethostname(), "why": why.splitlines()[0].removeprefix("phalanx run: ")},
            watch=(),
        )
        client.leave("it cannot run the job")


def _print(line: str) -> None:
    show(2, line)


def format_help() -> str:
    """Return the text of `phalanx join --help`."""
    import textwrap

    lines = [
        "Usage: phalanx join HOST:PORT [OPTIONS]",
        "",
        *textwrap.wrap(
            "Join the job that `phalanx run --nnodes N` has started on another host, which prints this line. That host "
            "sends the command, arguments, folder and options, and shows the output of all ranks. The job's key is "
            "read from --key-file, PHALANX_KEY_FILE, PHALANX_KEY or your configuration folder; on a terminal, "
            "phalanx join asks for it.",
            80,
        ),
        "",
        "Options:",
    ]
    for option in OPTIONS:
        if option.name in OWN_OPTIONS:
            lines.append(f"  --{option.name} {option.value}".rstrip())
            lines += textwrap.wrap(option.help, 80, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
