"""These are the options of `phalanx run`: torchrun's, those of the launcher before it, and a few of ours.

An option of torchrun can also be set by PET_ and its name in the environment; the command line overrides it.
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

    `field` is the field of `Settings` that the flag sets: `not:` sets it to False, `kind:` sets the kind of target; an
    empty field has a meaning only together with others (`phalanx._job.coordinator.rendezvous`); None has none.
    """

    name: str
    field: str | None
    help: str
    value: str = ""  # the name of the value in the help; empty for a flag without one
    read: Callable[[str], Any] = str
    short: str = ""
    torchruns: bool = True  # so that PET_… is read


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _read_count(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"must be a number, zero or more, got {text!r}")
    if len(text) > 9:
        raise ValueError(f"must be below a thousand million, got {text!r}")
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


def _read_host_timeout(text: str) -> float:
    value = _read_seconds(text)
    if value < 1:
        raise ValueError(f"must be at least 1 second, got {text!r}")
    return value


def _read_witness(text: str) -> str:
    from phalanx._job.hosts.succession.witness.address import read_witness  # here: most jobs are on one host

    return read_witness(text)


def _read_evict_after(text: str) -> float:
    value = _read_seconds(text)
    if value < 0.5:
        raise ValueError(f"must be at least 0.5 seconds, got {text!r}")
    return value


def _read_nproc(text: str) -> str:
    if text in ("auto", "cpu", "gpu"):
        return text
    if text == "xpu":
        raise ValueError("xpu: ranks are counted by CUDA GPUs or by cores; for other devices give their number")
    if not _is_number(text.removeprefix("-")):
        raise ValueError(f"must be a number, auto, cpu or gpu, got {text!r}")
    if text.startswith("-") or not text.strip("0"):
        raise ValueError(f"must be at least 1, got {text}")
    if len(text) > 9:
        raise ValueError(f"must be below a thousand million, got {text}")
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
        from phalanx._job.coordinator.rendezvous import split_endpoint  # here: a job on one host starts without it

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
        raise ValueError(f"{name} is for this command: ranks need no key. Give other hosts the key in a file")
    if not name or name in RANK_VARIABLES:
        raise ValueError(f"must be NAME or NAME=VALUE, of a variable that is not the launcher's, got {text!r}")
    return {name: value if equals else None}


def _read_start_method(text: str) -> str:
    if text not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"must be spawn, fork or forkserver, got {text!r}")
    return text


def _read_shell(text: str) -> str:
    if text not in ("bash", "zsh", "tcsh"):
        raise ValueError(f"must be bash, zsh or tcsh, got {text!r}")
    return text


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
                f"{name.strip() or 'nothing'!r}: {', '.join(ending)} end a job, SIGUSR1 and SIGUSR2 are passed on to "
                "the ranks, which may handle them"
            )
    return text


def _read_folder(text: str) -> str:
    if not text:
        raise ValueError("needs the name of a directory, got ''")
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
           "the same for so many neighbours. NCCL takes one rank per GPU, so their CUDA tensors are exchanged through "
           "memory of the host.", "N", _read_ranks_per_gpu, torchruns=False),
    Option("module", "kind:module", "Run a module, as `python -m` does.", short="m"),
    Option("no-python", "kind:program", "Run a program directly, not a Python script."),
    Option("log-dir", "log_dir", "Also write the lines of each rank into a file, DIR/rank_0.log, …, and the last "
           "operations of all ranks into DIR/flight.json.", "DIR"),
    Option("report", "report", "Leave a report of the run in DIR, however it ends: report.html (one file, which needs "
           "no network), and trace.json for ui.perfetto.dev.",
           "DIR", _read_folder, torchruns=False),
    Option("metrics", "metrics", "Serve what `phalanx top` shows at http://HOST:PORT/metrics, in the format of "
           "Prometheus. Without HOST only this host reaches it; another address needs a secret in "
           "PHALANX_METRICS_TOKEN.", "[HOST]:PORT", _read_metrics, torchruns=False),
    Option("redirects", "redirects", "Write the stdout (1), stderr (2) or both (3) of ranks into files, and do not "
           "show them: DIR/ID_…/attempt_0/LOCAL_RANK/stdout.log, as torchrun names them.",
           "0-3|RANK:0-3,…", _read_streams, short="r"),
    Option("tee", "tee", "The same, and show them as well.", "0-3|RANK:0-3,…", _read_streams, short="t"),
    Option("local-ranks-filter", "local_ranks_filter", "Show only what these local ranks print.", "RANK,…",
           _read_local_ranks),
    Option("log-line-prefix-template", "log_line_prefix_template", "Put this text before each line on the screen, in "
           "the place of the rank: ${role_name}, ${rank}, ${local_rank} and ${hostname} in it are replaced, as by "
           "torchrun. Equal lines are then shown once for each rank.", "TEMPLATE"),
    Option("traceback", "traceback", "Show whole tracebacks, of every rank and after Ctrl-C. By default, the first "
           "failure is shown without the lines of libraries, and each other rank has one line.", torchruns=False),
    Option("shutdown-timeout", "shutdown_timeout_s", "After Ctrl-C, SIGTERM or the failure of another rank, ranks get "
           "so many seconds to end before SIGKILL (default 30).", "SECONDS", _read_seconds),
    Option("exit-timeout", "exit_timeout_s", "When a rank has ended well, the others get so many seconds before they "
           "are stopped (default: no limit; the command says who is still there).",
           "SECONDS", _read_seconds, torchruns=False),
    Option("evict-after", "evict_after_s", "Kill a rank that keeps the others waiting for so many seconds without a "
           "sign of life: it is stopped, deadlocked, or waits for a dead disk. An elastic job replaces it. (Default: "
           "the command tells it, and kills nobody.)", "SECONDS", _read_evict_after, torchruns=False),
    Option("max-restarts", "max_restarts", "After a failure start all ranks again, up to N times (default 0). In an "
           "elastic job replace lost ranks, up to N of them (default: as often as it helps).", "N", _read_count),
    Option("role", "role", "Set ROLE_NAME for the ranks of this host (default: default).", "NAME"),
    Option("no-affinity", "not:affinity", "Do not pin ranks to cores.", torchruns=False),
    Option("no-preload", "not:preload", "Do not import torch before the ranks are forked. Scripts need this that set "
           "variables which torch reads at its import, or that do not use torch.", torchruns=False),
    Option("nnodes", "", "How many hosts the job has: a number, or the least and the most of them (default 1). With "
           "more than one host, this command prints what to type on the others.", "N|MIN:MAX", _read_nnodes),
    Option("env", "env", "Set a variable for the ranks of all hosts: NAME=VALUE, or NAME with its value here. "
           "You may give this option several times.", "NAME[=VALUE]", _read_variable, torchruns=False),
    Option("key-file", "key_file", "The file with the key of a job of several hosts, which `phalanx key` makes. "
           "Without this option the key is looked for in PHALANX_KEY_FILE, PHALANX_KEY and your configuration folder.",
           "FILE", torchruns=False),
    Option("host-timeout", "", "A host that sends no heartbeat for so many seconds is lost, and the job fails (default "
           "9).", "SECONDS", _read_host_timeout, torchruns=False),
    Option("witness", "", "A place outside the job that has a vote when hosts are lost, so that a job of two hosts "
           "goes on without either: HOST:PORT of a `phalanx coordinator` on a third host, or "
           "etcd://HOST:PORT. Only the first host needs the option.",
           "HOST:PORT|etcd://HOST:PORT", _read_witness, torchruns=False),
    Option("hosts", None, "Start the job on these hosts over ssh, from here. The first one leads. A host may have a "
           "number of ranks (default: what --nproc-per-node finds there).",
           "[USER@]HOST[:N],…", torchruns=False),
    Option("hostfile", None, "The same hosts, listed in a file: a line HOST slots=N for each.", "FILE",
           torchruns=False),
    Option("ssh", None, "The command that reaches a host of --hosts (default: ssh), with its options.", "COMMAND",
           torchruns=False),
    Option("remote-dir", None, "The folder in which the job runs on the hosts of --hosts (default: the same path as "
           "here).", "DIR", torchruns=False),
    Option("remote-python", None, "The Python on the hosts of --hosts: a path, or a name that the login shell there "
           "finds (default: the same path as here).", "PYTHON", torchruns=False),
    Option("detach", None, "Let the job on --hosts outlive this terminal: the command ends when all ranks have "
           "started. Needs --log-dir.", torchruns=False),
    Option("node-rank", "", "The number of this host, if the hosts meet at --master-addr.", "N", _read_count),
    Option("master-addr", "master_addr", "Where the hosts meet: an address of the host with --node-rank 0. On one host "
           "it is MASTER_ADDR for the ranks (default 127.0.0.1).", "HOST", _read_host),
    Option("master-port", "master_port", "The port at which the hosts meet (default 29500). On one host it is "
           "MASTER_PORT for the ranks (default: a free one).", "PORT", _read_port),
    Option("rdzv-backend", "", "static: the hosts have numbers and meet at --master-addr. c10d: they meet at "
           "--rdzv-endpoint, without numbers. Both use the same service, authenticated and encrypted.", "static|c10d"),
    Option("rdzv-endpoint", "", "Where the hosts meet: HOST[:PORT]. HOST is an address of one of them.",
           "HOST[:PORT]", _read_endpoint),
    Option("rdzv-id", "run_id", "Set TORCHELASTIC_RUN_ID for the ranks.", "ID"),
    Option("rdzv-conf", "", "Settings that torchrun has: is_host, timeout, join_timeout, last_call_timeout, "
           "keep_alive_interval and keep_alive_max_attempt.", "KEY=VALUE,…", _read_conf),
    Option("local-addr", "", "The address at which other hosts reach this one (default: the one from which it reaches "
           "the first host).", "HOST", _read_host),
    Option("standalone", "standalone", "Make a job of its own, even if Slurm or MPI start this command several times."),
    Option("run-path", "kind:script", "The target is a script, as for torchrun."),
    Option("use-env", "not:local_rank_argument", "Give the script no argument for its local rank: it reads LOCAL_RANK, "
           "as with torch.distributed.launch.", torchruns=False),
    Option("print-completion", "print_completion", "Print a script by which a shell completes these options, and exit. "
           "(`phalanx completion` is for all commands.)", "bash|zsh|tcsh", _read_shell, torchruns=False),
    Option("start-method", None, "It is taken and has no effect: ranks are forked from a process that has imported "
           "torch, and behave like fresh ones.", "spawn|fork|forkserver", _read_start_method),
    Option("monitor-interval", None, "It is taken and has no effect: ends of ranks are noticed at once.",
           "SECONDS", _read_seconds),
    Option("signals-to-handle", "signals_to_handle", "Set TORCHELASTIC_SIGNALS_TO_HANDLE for the ranks (default: "
           "SIGTERM,SIGINT,SIGHUP,SIGQUIT). Each of these signals ends a job.", "NAME,…", _read_signals),
)  # fmt: skip

# Options that torchrun has as well: those can be shortened, and come as PET_ variables.
TORCHRUNS = tuple(option.name for option in OPTIONS if option.torchruns)

# torchrun's options that are refused: the alternative, and the value that is harmless.
REFUSED = {
    "duplicate-stdout-filters": ("use --log-dir, which keeps a file per rank", ""),
    "duplicate-stderr-filters": ("use --log-dir, which keeps a file per rank", ""),
    "logs-specs": ("it names a class of torchrun's that writes logs; use --log-dir, --redirects or --tee", ""),
    "event-log-handler": ("nothing records events; the output says how a job ended", "null"),
    "numa-binding": ("each rank is pinned to cores next to each other; --no-affinity leaves them free", ""),
    "virtual-local-rank": ("LOCAL_RANK is the rank on this host; set CUDA_VISIBLE_DEVICES in the script", "0"),
}


def find_names(given: str) -> list[str]:
    """Return the options that `given`, without its dashes, may mean: one if it is a name, or a torchrun abbreviation.

    As in torchrun's parser an unambiguous beginning of a name is enough; only torchrun's own names can be shortened.
    """
    name = given.replace("_", "-")
    known = {option.name for option in OPTIONS}
    if name in known or name in REFUSED:
        return [name]
    return [full for full in (*TORCHRUNS, *REFUSED) if name and full.startswith(name)]


def explain_unknown(given: str, name: str) -> str:
    """Return the error for the unknown flag `given`."""
    if len(names := find_names(name)) > 1:
        return f"{given}: may be any of {', '.join(f'--{full}' for full in names)}. Write it out."
    if names and names[0] in REFUSED:
        return f"{given}: not in this version: {REFUSED[names[0]][0]}."
    import difflib

    known = [option.name for option in OPTIONS]
    near = [other for other in known if name and other.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    advice = f"Did you mean --{near[0]}?" if near else "`phalanx run --help` lists the options."
    return f"{given}: no such option. {advice} Options of the script go behind the script."
