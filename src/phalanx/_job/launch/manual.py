"""Format the help of `phalanx run`, on two screens.

The reference page describes every option in full.
"""

from __future__ import annotations

import textwrap

from phalanx._job.launch.options import OPTIONS

_WIDTH = 80
_COLUMN = 29

# By title of a section: its options, with a line of help for each.
SECTIONS: dict[str, dict[str, str]] = {
    "Start": {
        "nproc-per-node": "ranks: N, gpu, cpu, or auto (the default)",
        "module": "run a module, as `python -m` does",
        "no-python": "run a program, not a Python script",
        "env": "set a variable for the ranks of all hosts",
        "ranks-per-gpu": "ranks that share a GPU (default 1)",
        "no-affinity": "do not pin ranks to cores",
        "no-preload": "let each rank import torch itself",
    },
    "Output": {
        "log-dir": "also write each rank's lines to a file in DIR",
        "report": "write a report of the run to DIR/report.html",
        "metrics": "serve metrics of the running job for Prometheus",
        "redirects": "write stdout (1), stderr (2), both (3) to files",
        "tee": "like --redirects, but also show them",
        "local-ranks-filter": "show only these local ranks",
    },
    "When a rank fails or exits": {
        "max-restarts": "restarts of all ranks after a failure",
        "traceback": "also show the lines of libraries in tracebacks",
        "shutdown-timeout": "seconds between SIGTERM and SIGKILL (default 30)",
        "exit-timeout": "seconds from a rank's success to SIGTERM",
        "evict-after": "seconds to wait before killing a stuck rank",
    },
    "Several hosts": {
        "hosts": "start the job on these hosts over ssh",
        "hostfile": "read the hosts from a file: HOST slots=N",
        "detach": "exit when all ranks of --hosts have started",
        "nnodes": "number of hosts, N or MIN:MAX (default 1)",
        "key-file": "file with the job's key (see `phalanx key`)",
        "host-timeout": "seconds until a silent host is lost (default 9)",
        "witness": "a third vote: either of two hosts may be lost",
        "node-rank": "number of this host, with --master-addr",
        "master-addr": "address of host 0",
        "master-port": "its port (default 29500)",
        "rdzv-endpoint": "the rendezvous, with --rdzv-backend c10d",
    },
}

_ALSO = "Also: {names}. Options of torchrun can be shortened, and set by variables such as PET_NPROC_PER_NODE."
_EXIT = (
    "Exit status: the status of the first failed rank, 128 + n for signal n; 2 for a wrong command line; 75 if too few "
    "ranks of an elastic job are left (start it again); 124 after --exit-timeout."
)


def format_help() -> str:
    """Return the text of `phalanx run --help`."""
    by_name = {option.name: option for option in OPTIONS}
    lines = [
        "Usage: phalanx run [OPTIONS] SCRIPT [ARGUMENTS]...",
        "Start a rank of SCRIPT for each GPU or core of this host, or of several hosts.",
    ]
    for title, entries in SECTIONS.items():
        lines.append(f"{title}:")
        for name, line in entries.items():
            option = by_name[name]
            flag = f"-{option.short}, --{name}" if option.short else f"--{name}"
            value = option.value.partition("|")[0].partition(",")[0]
            lines.append(f"  {f'{flag} {value}'.rstrip():{_COLUMN}} {line}")
    shown = {name for entries in SECTIONS.values() for name in entries}
    others = ", ".join(f"--{option.name}" for option in OPTIONS if option.name not in shown)
    for text in (_ALSO.format(names=others), _EXIT):
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines.append("More: `phalanx docs launching` prints the address of the page.")
    return "\n".join(lines)
