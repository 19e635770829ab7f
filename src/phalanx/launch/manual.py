"""Write the manual of `phalanx run`, which `phalanx run --help` prints."""

from __future__ import annotations

import textwrap

from phalanx.launch.options import OPTIONS, Option

_WIDTH = 80

# These options stand together, in the order of the manual and of the documentation's page on the command line.
SECTIONS: dict[str, tuple[str, ...]] = {
    "What to start": ("nproc-per-node", "module", "no-python", "run-path", "standalone", "no-affinity", "no-preload",
                      "ranks-per-gpu", "env", "role"),
    "What is shown and kept": ("log-dir", "report", "metrics", "redirects", "tee", "local-ranks-filter",
                               "log-line-prefix-template"),
    "When something fails or ends": ("max-restarts", "evict-after", "shutdown-timeout", "exit-timeout",
                                     "traceback"),
    "Several hosts": ("nnodes", "key-file", "host-timeout", "witness", "node-rank", "master-addr", "master-port",
                      "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr", "on"),
    "For scripts and shells that were written for torchrun": ("use-env", "print-completion", "start-method",
                                                              "monitor-interval", "signals-to-handle"),
}  # fmt: skip

EXAMPLES = (
    ("phalanx run train.py --lr 0.1", "One rank per GPU, or per core on a host without GPUs."),
    ("phalanx run --nproc-per-node 4 train.py", "Four ranks on this host."),
    ("phalanx run -m package.train", "Start a module, as `python -m` does."),
    ("phalanx run --nnodes 2 train.py", "Two hosts. The command prints the line to type on the other host."),
    ("phalanx run --report runs/a train.py", "Leave a report of the run in runs/a/report.html."),
)

EXIT_CODES = (
    ("0", "All ranks ended with 0."),
    ("1 to 255", "The exit code of the rank that failed first. It is 128 + n if signal n ended that rank."),
    ("2", "The command line is wrong. Nothing was started."),
    ("75", "Too few ranks of an elastic job are left. Its state is saved; start the job again later."),
    ("124", "The time of --exit-timeout has passed."),
    ("129, 130, 131, 143", "SIGHUP, Ctrl-C (SIGINT), SIGQUIT or SIGTERM ended the job."),
)

ENVIRONMENT = (
    ("PET_NPROC_PER_NODE, PET_NNODES, ...", "Options that torchrun also has. The command line goes before them."),
    ("PHALANX_KEY_FILE, PHALANX_KEY", "The key of a job of several hosts, if --key-file does not name it."),
    (
        "ETCDCTL_USER, ETCDCTL_PASSWORD, ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY",
        "The user, password and certificates for "
        "an etcd of --witness, on each host. PHALANX_WITNESS_PASSWORD_FILE names a file with the password.",
    ),
    ("OMP_NUM_THREADS", "Threads of each rank. If it is not set, the cores are divided among the ranks."),
    ("NO_COLOR, FORCE_COLOR", "Print without colours, or print colours into a pipe as well."),
)

_DESCRIPTION = (
    "phalanx run starts one process (a rank) for each GPU or core of this host. Each process finds its rank in the "
    "environment, as under torchrun. With --nnodes the job runs on several hosts.",
    "All words behind the script belong to the script. You may write options with dashes or with underscores: "
    "--nproc_per_node is --nproc-per-node.",
)

_OUTPUT = (
    "Each line carries the rank that printed it: `[2] text`. If several ranks print the same line within 0.1 s, it is "
    "shown once: `[0-3] text`. A progress bar stays at the bottom of a terminal; in a pipe or a file only its last "
    "state appears.",
    "If ranks fail, the first failure is told last, with its traceback.",
)

_SEE_ALSO = (
    "phalanx join, phalanx top, phalanx stacks, phalanx report, phalanx doctor. `phalanx docs launching` prints the "
    "address of the page that tells more."
)


def format_help() -> str:
    """Return the text of `phalanx run --help`."""
    by_name = {option.name: option for option in OPTIONS}
    lines = [
        "NAME",
        "    phalanx run - run a script on every core or GPU of this host, or of several",
        "",
        "SYNOPSIS",
        "    phalanx run [OPTIONS] SCRIPT [ARGUMENTS]...",
        "    phalanx run [OPTIONS] -m MODULE [ARGUMENTS]...",
        "    phalanx run [OPTIONS] --no-python PROGRAM [ARGUMENTS]...",
        "",
        "DESCRIPTION",
    ]
    for paragraph in _DESCRIPTION:
        lines += [*_wrap(paragraph, 4), ""]
    lines.append("OPTIONS")
    for title, names in SECTIONS.items():
        lines += [f"  {title}", ""]
        for name in names:
            lines += _format_option(by_name[name])
        lines.append("")
    lines += ["    -h, --help", "        Show this manual and exit.", "", "OUTPUT"]
    for paragraph in _OUTPUT:
        lines += [*_wrap(paragraph, 4), ""]
    for title, entries in (("EXIT STATUS", EXIT_CODES), ("ENVIRONMENT", ENVIRONMENT), ("EXAMPLES", EXAMPLES)):
        lines.append(title)
        for term, meaning in entries:
            lines += [f"    {term}", *_wrap(meaning, 8)]
        lines.append("")
    lines += ["SEE ALSO", *_wrap(_SEE_ALSO, 4)]
    return "\n".join(lines)


def _format_option(option: Option) -> list[str]:
    flag = f"-{option.short}, --{option.name}" if option.short else f"--{option.name}"
    return [f"    {flag} {option.value}".rstrip(), *_wrap(option.help, 8)]


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    )
