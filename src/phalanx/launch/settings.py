"""What the words of `phalanx run` ask for: parsed, and refused with all their problems at once.

Purely data: nothing here looks at the machine, so that every rule can be tested by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.target import Kind, Target

USAGE_EXIT_CODE = 2
_MAX_SECONDS = 365 * 24 * 3600
RANKS_PER_CORE = 64  # more is a slip of the finger: each rank is a process that wants memory and time


@dataclass(frozen=True)
class Settings:
    """A job as it was asked for. `nproc` is a number or a word: auto, cpu, gpu."""

    target: Target
    nproc: str = "auto"
    log_dir: str | None = None
    grace_s: float = 10.0
    exit_timeout_s: float | None = None
    affinity: bool = True
    preload: bool = True
    max_restarts: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    run_id: str = "none"
    standalone: bool = False


@dataclass(frozen=True)
class Option:
    """A flag, the field of `Settings` that it sets (None: accepted, and has no effect on one host), its help."""

    name: str
    field: str | None
    help: str
    value: str = ""  # what the help calls the value; empty for a flag without one
    read: Callable[[str], Any] = str
    short: str = ""


def _read_count(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"must be a number, zero or more, got {text!r}")
    if len(text) > 9:
        raise ValueError(f"must be below a thousand million, got {text!r}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _read_port(text: str) -> int:
    if not (_is_number(text) and len(text) <= 5 and int(text) <= 65535):
        raise ValueError(f"must be a port number, from 0 to 65535, got {text!r}")
    return int(text)


def _read_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be zero or more seconds, got {text!r}")
    if value > _MAX_SECONDS:
        raise ValueError(f"must be at most {_MAX_SECONDS} seconds, a year, got {text!r}")
    return value


def _read_nproc(text: str) -> str:
    if text in ("auto", "cpu", "gpu"):
        return text
    if not _is_number(text.removeprefix("-")):
        raise ValueError(f"must be a number, auto, cpu or gpu, got {text!r}")
    if text.startswith("-") or not text.strip("0"):
        raise ValueError(f"must be at least 1, got {text}")
    if len(text) > 9:
        raise ValueError(f"must be below a thousand million, got {text}")
    return str(int(text))


def _read_nnodes(text: str) -> str:
    if text not in ("1", "1:1"):
        raise ValueError(f"this version runs on one host, got {text!r}. Start on one host, with --nnodes 1 or without")
    return text


def _read_node_rank(text: str) -> str:
    if text != "0":
        raise ValueError(f"this version runs on one host, whose rank is 0, got {text!r}")
    return text


OPTIONS = (
    Option("nproc-per-node", "nproc", "Ranks on this host: a number; gpu; cpu (one per core that this command may use) "
           "or auto (gpu if there are GPUs, else cpu; the default).", "N|auto|cpu|gpu", _read_nproc),
    Option("module", "kind:module", "Run a module, as `python -m` does.", short="m"),
    Option("no-python", "kind:program", "Run a program directly instead of a Python script."),
    Option("log-dir", "log_dir", "Also keep each rank's lines in a file, DIR/rank_0.log, …, and what the ranks' "
           "flight recorders hold: DIR/flight.json, DIR/flight.trace.json.", "DIR"),
    Option("grace", "grace_s", "Seconds that ranks get to end after Ctrl-C, SIGTERM or another rank's failure, before "
           "SIGKILL (default 10).", "SECONDS", _read_seconds),
    Option("exit-timeout", "exit_timeout_s", "Once a rank has ended well, seconds that the others may take before they "
           "are stopped (default: no limit; the command says who is still there).", "SECONDS", _read_seconds),
    Option("max-restarts", "max_restarts", "After a failure start all ranks again, up to N times (default 0).", "N",
           _read_count),
    Option("no-affinity", "not:affinity", "Do not pin ranks to cores."),
    Option("no-preload", "not:preload", "Do not import torch before the ranks are forked: for scripts that set "
           "variables which torch reads at its import, or that do not use torch."),
    Option("master-addr", "master_addr", "MASTER_ADDR for the ranks (default 127.0.0.1).", "HOST"),
    Option("master-port", "master_port", "MASTER_PORT for the ranks (default: a free one).", "PORT", _read_port),
    Option("rdzv-id", "run_id", "TORCHELASTIC_RUN_ID for the ranks.", "ID"),
    Option("standalone", "standalone", "A job of its own, also where Slurm or MPI start this command several times."),
    Option("use-env", None, "As torch.distributed.launch's; LOCAL_RANK is always in the environment."),
    Option("nnodes", None, "Only 1 in this version.", "1", _read_nnodes),
    Option("node-rank", None, "Only 0 in this version.", "0", _read_node_rank),
)  # fmt: skip

# torchrun's flags that this version doesn't have, and what to do instead.
_REFUSED = {
    "rdzv-backend": "one host needs no rendezvous; leave it out",
    "rdzv-endpoint": "one host needs no rendezvous; leave it out",
    "rdzv-conf": "one host needs no rendezvous; leave it out",
    "local-addr": "one host needs no rendezvous; use --master-addr",
    "start-method": "ranks are always forked from a process that has torch imported",
    "redirects": "use --log-dir, which keeps a file per rank",
    "tee": "use --log-dir, which keeps a file per rank; all ranks are always shown",
    "local-ranks-filter": "use --log-dir; identical lines of several ranks are shown once",
    "role": "this version has one role",
    "monitor-interval": "ends of ranks are noticed at once",
    "r": "use --log-dir, which keeps a file per rank",
    "t": "use --log-dir, which keeps a file per rank; all ranks are always shown",
    "duplicate-stdout-filters": "use --log-dir, which keeps a file per rank",
    "duplicate-stderr-filters": "use --log-dir, which keeps a file per rank",
    "logs-specs": "use --log-dir, which keeps a file per rank",
    "event-log-handler": "nothing records events; the output says how a job ended",
    "numa-binding": "each rank is pinned to cores next to each other; --no-affinity leaves them free",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP end a job, SIGUSR1 and SIGUSR2 are passed on to the ranks",
    "shutdown-timeout": "use --grace",
    "virtual-local-rank": "LOCAL_RANK is the rank on this host; set CUDA_VISIBLE_DEVICES in the script",
    "run-path": "give the script's path",
}


def parse(words: Sequence[str]) -> Settings | None:
    """The settings that the words after `phalanx run` ask for; None if they ask for help.

    Everything behind the script belongs to the script.

    Raises:
        LaunchError: with every problem of the command line, one per line; its exit code is 2.
    """
    options = {option.name: option for option in OPTIONS}
    options.update({option.short: option for option in OPTIONS if option.short})
    fields: dict[str, Any] = {}
    kinds: list[Kind] = []
    problems: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-h", "--help"):
            return None
        given, separator, attached = word.partition("=")
        name = given.lstrip("-").replace("_", "-")
        option = options.get(name)
        if option is None or given.startswith("--") == (name == option.short):
            # An unknown flag's own value, if it has one, can't be told from the script: stop at the first.
            problems.append(_explain_unknown(given, name))
            rest = []
            break
        if not option.value:
            if separator:
                problems.append(f"{given}: takes no value, got {attached!r}")
            if option.field and option.field.startswith("kind:"):
                kinds.append("module" if option.name == "module" else "program")
            elif option.field:
                fields[option.field.removeprefix("not:")] = not option.field.startswith("not:")
            continue
        if not separator:
            if not rest:
                problems.append(f"{given}: needs a value: {given} {option.value}")
                break
            attached = rest.pop(0)
        try:
            value = option.read(attached)
        except ValueError as error:
            problems.append(f"{given}: {error}")
            continue
        if option.field:
            fields[option.field] = value
    if len(set(kinds)) > 1:
        problems.append("-m and --no-python: a job is a module or a program, not both")
    if not rest and not problems:
        problems.append("no script: say what to run, for example: phalanx run train.py")
    if problems:
        raise LaunchError("\n".join(f"phalanx run: {problem}" for problem in problems), exit_code=USAGE_EXIT_CODE)
    target = Target(kinds[0] if kinds else "script", rest[0], tuple(rest[1:]))
    return Settings(target, **fields)


def decide_num_ranks(nproc: str, cpus: int, gpus: int) -> int:
    """How many ranks `nproc` means on a host with so many usable cores and GPUs.

    Raises:
        LaunchError: gpu without a GPU, or more ranks than any use could explain.
    """
    if nproc == "gpu" and gpus == 0:
        raise LaunchError(
            "phalanx run: --nproc-per-node gpu: this host has no GPU that CUDA could use "
            "(the driver shows none, or CUDA_VISIBLE_DEVICES hides them). "
            f"Use --nproc-per-node cpu for {cpus} ranks, one per core; `nvidia-smi` shows what the driver sees.",
            exit_code=USAGE_EXIT_CODE,
        )
    if nproc in ("auto", "cpu", "gpu"):
        return gpus if nproc == "gpu" or (nproc == "auto" and gpus) else cpus
    count, limit = int(nproc), RANKS_PER_CORE * max(cpus, 1)
    if count > limit:
        raise LaunchError(
            f"phalanx run: --nproc-per-node {count}: more than {RANKS_PER_CORE} ranks for each of the {cpus} cores "
            f"that this command may use, {limit} in all. Give at most that; --nproc-per-node cpu starts {cpus}.",
            exit_code=USAGE_EXIT_CODE,
        )
    return count


def format_help() -> str:
    """The text of `phalanx run --help`."""
    import textwrap

    lines = [
        "Usage: phalanx run [OPTIONS] SCRIPT [ARGUMENTS]…",
        "       phalanx run [OPTIONS] -m MODULE [ARGUMENTS]…",
        "       phalanx run [OPTIONS] --no-python PROGRAM [ARGUMENTS]…",
        "",
        "Start one process per core or GPU of this host, each with its rank in the",
        "environment, as torchrun does. What stands behind the script belongs to the",
        "script. Dashes and underscores are the same: --nproc_per_node.",
        "",
        "Options:",
    ]
    for option in OPTIONS:
        flag = f"-{option.short}, --{option.name}" if option.short else f"--{option.name}"
        lines.append(f"  {flag} {option.value}".rstrip())
        lines += textwrap.wrap(option.help, 80, initial_indent=" " * 8, subsequent_indent=" " * 8)
    lines += [
        "  -h, --help",
        "        Show this and exit.",
        "",
        *textwrap.wrap(
            "Output: a line carries its rank, `[2] text`; the same line from several ranks within 0.1 s is shown once, "
            "`[0-3] text`. What a carriage return redraws (a progress bar) stays at the bottom of a terminal; in a "
            "pipe or a file only its final state appears. When ranks fail, the first failure is told last; its exit "
            "code is the command's, 128 + n for signal n. NO_COLOR and FORCE_COLOR are honoured.",
            80,
        ),
    ]
    return "\n".join(lines)


def _explain_unknown(given: str, name: str) -> str:
    if name in _REFUSED:
        return f"{given}: not in this version: {_REFUSED[name]}."
    import difflib

    known = [option.name for option in OPTIONS]
    near = [other for other in known if name and other.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    advice = f"Did you mean --{near[0]}?" if near else "`phalanx run --help` lists the options."
    return f"{given}: no such option. {advice} Options of the script go behind the script."
