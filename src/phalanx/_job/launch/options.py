"""Define the options of `phalanx run`: torchrun's, torch.distributed.launch's, and a few of ours.

The environment variable PET_NAME also sets an option of torchrun; the command line overrides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx._job.agent.environment import KEY_VARIABLE, RANK_VARIABLES
from phalanx._job.output.logs import Streams

_MAX_SECONDS = 365 * 24 * 3600
_MAX_RANKS_PER_GPU = 64


@dataclass(frozen=True)
class Option:
    """An `Option` is a flag and its help.

    `field` is the field of `Settings` that the flag sets: `not:FIELD` sets it to False, `kind:KIND` sets the kind of
    target. The field is empty for options of the rendezvous (`phalanx._job.launch.rendezvous_options`), and None for
    options that set no field.
    """

    name: str
    field: str | None
    help: str
    value: str = ""  # the name of the value in the help; empty for a flag without a value
    read: Callable[[str], Any] = str
    short: str = ""
    torchruns: bool = True  # whether torchrun has the option; a variable PET_… sets it, too


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _read_count(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"must be a number, zero or more, got {text!r}")
    if len(text) > 9:
        raise ValueError(f"must be below 1,000,000,000, got {text!r}")
    return int(text)


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


def _at_least(least_s: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = _read_seconds(text)
        if value < least_s:
            raise ValueError(f"must be at least {least_s:g} second{'s' * (least_s != 1)}, got {text!r}")
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}, got {text!r}")
        return text

    return read


def _read_witness(text: str) -> str:
    from phalanx._job.hosts.succession.witness.address import read_witness  # here, because most jobs are on one host

    return read_witness(text)


def _read_nproc(text: str) -> str:
    if text in ("auto", "cpu", "gpu"):
        return text
    if text == "xpu":
        raise ValueError("xpu: ranks are counted only by CUDA GPUs or cores; for other devices, give a number")
    if not _is_number(text.removeprefix("-")):
        raise ValueError(f"must be a number, auto, cpu or gpu, got {text!r}")
    if text.startswith("-") or not text.strip("0"):
        raise ValueError(f"must be at least 1, got {text}")
    if len(text) > 9:
        raise ValueError(f"must be below 1,000,000,000, got {text}")
    return str(int(text))


def _read_ranks_per_gpu(text: str) -> int:
    count = _read_count(text)
    if not 1 <= count <= _MAX_RANKS_PER_GPU:
        raise ValueError(f"must be from 1 to {_MAX_RANKS_PER_GPU}, got {text!r}")
    return count


def _read_nnodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (_is_number(low) and (not colon or _is_number(high)) and len(text) < 12):
        raise ValueError(f"must be a number of hosts, or MIN:MAX, got {text!r}")
    least, most = int(low), int(high if colon else low)
    if not 1 <= least <= most:
        raise ValueError(f"must be at least 1, and MIN at most MAX, got {text!r}")
    return least, most


def _read_endpoint(text: str) -> str:
    if text:
        from phalanx._job.coordinator.rendezvous import split_endpoint  # here, because most jobs are on one host

        split_endpoint(text, 0)
    return text


def _read_host(text: str) -> str:
    if not text:
        raise ValueError("must be a name or an address, got ''")
    from phalanx._job.coordinator.rendezvous import split_endpoint

    split_endpoint(text if text.startswith("[") else f"[{text}]", 0)
    return text.removeprefix("[").removesuffix("]")


def _read_metrics(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port:
        raise ValueError(f"must be :PORT or HOST:PORT, got {text!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", _read_port(port)


def _read_conf(text: str) -> dict[str, str]:
    conf = {}
    for part in text.split(",") if text.strip() else ():
        key, _, value = part.partition("=")
        if not (key.strip() and value.strip()):
            raise ValueError(f"must be KEY=VALUE,KEY=VALUE, got {text!r}")
        conf[key.strip()] = value.strip()
    return conf


def _read_variable(text: str) -> dict[str, str | None]:
    name, equals, value = text.partition("=")
    if name == KEY_VARIABLE:
        raise ValueError(f"{name} is only for this command: ranks need no key. Copy the key to other hosts in a file")
    if not name or name in RANK_VARIABLES:
        raise ValueError(f"must be NAME or NAME=VALUE, and not a variable of the launcher, got {text!r}")
    return {name: value if equals else None}


def _read_local_ranks(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if not all(_is_number(part.strip()) and len(part) < 9 for part in text.split(",")):
        raise ValueError(f"must be local ranks, such as 0,1,2, got {text!r}")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _read_signals(text: str) -> str:
    ending = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    for name in text.split(","):
        if name.strip() not in ending:
            raise ValueError(
                f"{name.strip() or 'nothing'!r}: only {', '.join(ending)} end a job; SIGUSR1 and SIGUSR2 are relayed "
                "to the ranks, which may handle them"
            )
    return text


def _read_folder(text: str) -> str:
    if not text:
        raise ValueError("must be a directory, got ''")
    return text


def _read_streams(text: str) -> Streams:
    if len(text) == 1 and text in "0123":
        return Streams(int(text))
    pairs = [part.partition(":") for part in text.split(",")]
    if not all(_is_number(rank) and len(rank) < 9 and len(std) == 1 and std in "0123" for rank, _, std in pairs):
        raise ValueError(
            "must be 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or that for local ranks, such as 0:3,1:2, got "
            f"{text!r}"
        )
    return Streams(0, tuple((int(rank), int(std)) for rank, _, std in pairs))


OPTIONS = (
    Option("nproc-per-node", "nproc_per_node", "How many ranks this host starts: a number, gpu, cpu (one for each "
           "core that this command may use), or auto (the default: gpu if there are GPUs, else cpu).",
           "N|auto|cpu|gpu", _read_nproc),
    Option("ranks-per-gpu", "ranks_per_gpu", "How many ranks share a GPU (default 1). phalanx.init().device is then "
           "the same for that many consecutive ranks. NCCL allows one rank per GPU, so their CUDA tensors are "
           "exchanged through host memory.", "N", _read_ranks_per_gpu, torchruns=False),
    Option("module", "kind:module", "Run a module, as `python -m` does.", short="m"),
    Option("no-python", "kind:program", "Run a program directly, not a Python script."),
    Option("log-dir", "log_dir", "Also write the lines of each rank to a file, DIR/rank_0.log, …, and the last "
           "operations of all ranks to DIR/flight.json.", "DIR"),
    Option("report", "report", "Write a report of the run to DIR, whatever its result: report.html (one file, "
           "which needs no network), and trace.json for ui.perfetto.dev.",
           "DIR", _read_folder, torchruns=False),
    Option("metrics", "metrics", "Serve the metrics of `phalanx top` at http://HOST:PORT/metrics, in the format of "
           "Prometheus. Without HOST, only this host reaches them; any other address needs a secret in "
           "PHALANX_METRICS_TOKEN.", "[HOST]:PORT", _read_metrics, torchruns=False),
    Option("redirects", "redirects", "Write the stdout (1), stderr (2) or both (3) of ranks to files, and do not "
           "show them: DIR/ID_…/attempt_0/LOCAL_RANK/stdout.log, as in torchrun.",
           "0-3|RANK:0-3,…", _read_streams, short="r"),
    Option("tee", "tee", "The same as --redirects, but also show them.", "0-3|RANK:0-3,…", _read_streams, short="t"),
    Option("local-ranks-filter", "local_ranks_filter", "Show only the output of these local ranks.", "RANK,…",
           _read_local_ranks),
    Option("log-line-prefix-template", "log_line_prefix_template", "Print this prefix before each line on the "
           "screen, instead of the rank: ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced, as in "
           "torchrun. Equal lines are then shown once for each rank.", "TEMPLATE"),
    Option("traceback", "traceback", "Show whole tracebacks, of every rank and after Ctrl-C. By default, the first "
           "failure is shown without the lines of libraries, and each other rank gets one line.", torchruns=False),
    Option("shutdown-timeout", "shutdown_timeout_s", "The time between SIGTERM, Ctrl-C or the failure of another rank "
           "and SIGKILL, in seconds (default 30).", "SECONDS", _read_seconds),
    Option("exit-timeout", "exit_timeout_s", "The time between the success of the first rank and SIGTERM to the "
           "others, in seconds (default: no limit; the command reports the ranks that are still running).",
           "SECONDS", _read_seconds, torchruns=False),
    Option("evict-after", "evict_after_s", "Kill a rank that makes the others wait and is inactive for this many "
           "seconds: it is stopped, deadlocked, or waits for a dead disk. An elastic job replaces it. (Default: "
           "the command only reports the rank.)", "SECONDS", _at_least(0.5), torchruns=False),
    Option("max-restarts", "max_restarts", "After a failure, restart all ranks, up to N times (default 0). In an "
           "elastic job, replace up to N lost ranks (default: as long as the job makes progress).", "N", _read_count),
    Option("role", "role", "Set ROLE_NAME for the ranks of this host (default: default).", "NAME"),
    Option("no-affinity", "not:affinity", "Do not pin ranks to cores.", torchruns=False),
    Option("no-preload", "not:preload", "Do not import torch before the ranks are forked. Use this for scripts that "
           "set variables which torch reads when imported, or that do not use torch.", torchruns=False),
    Option("nnodes", "", "The number of hosts, or its minimum and maximum (default 1). With more than "
           "one host, this command prints the line to type on the others.", "N|MIN:MAX", _read_nnodes),
    Option("env", "env", "Set a variable for the ranks of all hosts: NAME=VALUE, or NAME with its value here. "
           "You may give this option several times.", "NAME[=VALUE]", _read_variable, torchruns=False),
    Option("key-file", "key_file", "The file with the key of a job on several hosts; `phalanx key` creates it. "
           "Without this option, the key is read from PHALANX_KEY_FILE, PHALANX_KEY or your configuration folder.",
           "FILE", torchruns=False),
    Option("host-timeout", "", "The time without a heartbeat after which a host is lost, in seconds "
           "(default 9).", "SECONDS", _at_least(1), torchruns=False),
    Option("witness", "", "A service outside the job that votes when hosts are lost, so that a job on two hosts "
           "survives the loss of either: HOST:PORT of a `phalanx coordinator` on a third host, or "
           "etcd://HOST:PORT. Only the first host needs the option.",
           "HOST:PORT|etcd://HOST:PORT", _read_witness, torchruns=False),
    Option("hosts", None, "Start the job on these hosts over ssh. The first host leads. N is the number of ranks "
           "on a host (default: --nproc-per-node).",
           "[USER@]HOST[:N],…", torchruns=False),
    Option("hostfile", None, "The same hosts, in a file with a line HOST slots=N for each.", "FILE",
           torchruns=False),
    Option("ssh", None, "The command that connects to a host of --hosts (default: ssh), with its options.", "COMMAND",
           torchruns=False),
    Option("remote-dir", None, "The folder in which the job runs on the hosts of --hosts (default: the same path as "
           "here).", "DIR", torchruns=False),
    Option("remote-python", None, "The Python on the hosts of --hosts: a path, or a name for their login shell "
           "(default: the same path as here).", "PYTHON", torchruns=False),
    Option("detach", None, "Keep the job on --hosts running without this terminal: the command exits when all "
           "ranks have started. Needs --log-dir.", torchruns=False),
    Option("node-rank", "", "The number of this host, with --master-addr.", "N", _read_count),
    Option("master-addr", "master_addr", "The rendezvous of the hosts: an address of the host with --node-rank 0. On "
           "one host, MASTER_ADDR for the ranks (default 127.0.0.1).", "HOST", _read_host),
    Option("master-port", "master_port", "The port of the rendezvous (default 29500). On one host, MASTER_PORT for the "
           "ranks (default: a free port).", "PORT", _read_port),
    Option("rdzv-backend", "", "static: the hosts have numbers and connect to --master-addr. c10d: they "
           "connect to --rdzv-endpoint, without numbers. Both use the same service, authenticated and encrypted.",
           "static|c10d"),
    Option("rdzv-endpoint", "", "The rendezvous of the hosts: HOST[:PORT]. HOST is an address of one of them.",
           "HOST[:PORT]", _read_endpoint),
    Option("rdzv-id", "run_id", "Set TORCHELASTIC_RUN_ID for the ranks.", "ID"),
    Option("rdzv-conf", "", "Settings of torchrun: is_host, timeout, join_timeout, last_call_timeout, "
           "keep_alive_interval and keep_alive_max_attempt.", "KEY=VALUE,…", _read_conf),
    Option("local-addr", "", "The address at which other hosts reach this host (default: its address on the route to "
           "the first host).", "HOST", _read_host),
    Option("standalone", "standalone", "Start a separate job, even if Slurm or MPI start this command several times."),
    Option("run-path", "kind:script", "The target is a script, as for torchrun."),
    Option("use-env", "not:local_rank_argument", "Pass the script no --local-rank argument: it reads LOCAL_RANK, as "
           "with torch.distributed.launch.", torchruns=False),
    Option("start-method", None, "Accepted without effect: ranks are forked from a process that has imported torch, "
           "and behave like spawned processes.", "spawn|fork|forkserver", _one_of("spawn", "fork", "forkserver")),
    Option("monitor-interval", None, "Accepted without effect: exits of ranks are detected at once.",
           "SECONDS", _read_seconds),
    Option("signals-to-handle", "signals_to_handle", "Set TORCHELASTIC_SIGNALS_TO_HANDLE for the ranks (default: "
           "SIGTERM,SIGINT,SIGHUP,SIGQUIT). Each of these signals ends a job.", "NAME,…", _read_signals),
)  # fmt: skip

# Options that torchrun has, too: they can be shortened, and set by PET_ variables.
TORCHRUNS = tuple(option.name for option in OPTIONS if option.torchruns)

# torchrun's options that are refused: the alternative, and the value that is accepted.
REFUSED = {
    "duplicate-stdout-filters": ("use --log-dir, which writes a file per rank", ""),
    "duplicate-stderr-filters": ("use --log-dir, which writes a file per rank", ""),
    "logs-specs": ("it selects a logging class of torchrun; use --log-dir, --redirects or --tee", ""),
    "event-log-handler": ("no events are recorded; the output has the job's result", "null"),
    "numa-binding": ("each rank is pinned to neighbouring cores; --no-affinity disables pinning", ""),
    "print-completion": ("use `phalanx completion`, for bash, zsh and fish", ""),
    "virtual-local-rank": ("LOCAL_RANK is the rank on this host; set CUDA_VISIBLE_DEVICES in the script", "0"),
}


def find_names(given: str) -> list[str]:
    """Return the options that `given`, without its dashes, may mean.

    As in torchrun's parser, an unambiguous prefix of a name is enough; only torchrun's own names can be shortened.
    """
    name = given.replace("_", "-")
    known = {option.name for option in OPTIONS}
    if name in known or name in REFUSED:
        return [name]
    return [full for full in (*TORCHRUNS, *REFUSED) if name and full.startswith(name)]


def explain_unknown(given: str, name: str) -> str:
    """Return the error for the unknown flag `given`."""
    if len(names := find_names(name)) > 1:
        return f"{given}: may be any of {', '.join(f'--{full}' for full in names)}. Write it in full."
    if names and names[0] in REFUSED:
        return f"{given}: not in this version: {REFUSED[names[0]][0]}."
    if name == "backend":
        return f"{given}: no such option. The script chooses the backend, in init_process_group."
    import difflib

    known = [option.name for option in OPTIONS]
    near = [other for other in known if name and other.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    advice = f"Did you mean --{near[0]}?" if near else "`phalanx run --help` lists the options."
    return f"{given}: no such option. {advice} Options of the script follow the script."
