"""Run the `phalanx` command."""

from __future__ import annotations

import signal
import sys

from phalanx._job.output.standard import open_standard_descriptors

open_standard_descriptors()  # first: importing ctypes may open a file that gets the number of a closed descriptor
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports exits without a traceback: nothing was started.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(words: list[str]) -> int:
    """Run `phalanx run` with `words`, here or over ssh; return the exit code."""
    if any(word.startswith(("--host", "--ssh", "--remote", "--detach")) for word in words):
        from phalanx._job.launch.command_line import SSH_OPTIONS, split_options

        if split_options(words, SSH_OPTIONS)[0]:
            from phalanx._job.ssh.job import main as run_over_ssh

            return run_over_ssh(words)
    from phalanx._job.launch.command import main as run_here

    return run_here(words)


def main() -> None:
    """Run the `phalanx` script."""
    words = sys.argv[1:]
    if words[:1] == ["run"]:
        # `run` must start fast, and does not import click.
        sys.exit(run(words[1:]))
    from phalanx._job.output.standard import guarded
    from phalanx.cli.commands import group

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    guarded(lambda: group(prog_name="phalanx"))


if __name__ == "__main__":
    main()
