"""Execute `phalanx run`.

    words ─▶ Settings (command_line) ─▶ JobPlan (plan_job) ─▶ zygote and agent ─▶ exit code

The zygote is started first: while it imports torch, the agent loads everything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx._base.ipc.signals import caught_signals
from phalanx._base.processes import SUPPORTED, adopt_orphans, kill_descendants
from phalanx._job.agent import limits
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.launch.command_line import read_settings
from phalanx._job.launch.plan_job import plan_job
from phalanx._job.output.standard import guarded, open_standard_descriptors, show
from phalanx._job.schedulers import SIGNS
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from phalanx._job.hosts.first_host import JoinedJob

_CAUGHT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT", "SIGCHLD")


def main(words: Sequence[str], *, old_launcher: bool = False) -> int:
    """Run the job that `words` describe; print problems on stderr; return the exit code.

    `old_launcher`: parse the words like torch.distributed.launch.
    """
    open_standard_descriptors()
    return report_errors(lambda: _run(words, os.environ, old_launcher=old_launcher))


def report_errors(command: Callable[[], int], name: str = "run") -> int:
    """Call `command`, which runs `phalanx NAME`; print its LaunchError; return the exit code."""
    try:
        return command()
    except LaunchError as error:
        show(2, str(error).replace("phalanx run:", f"phalanx {name}:"))
        return error.exit_code
    except KeyboardInterrupt:  # before signals are handled: nothing was started
        return 128 + signal.SIGINT


def _run(words: Sequence[str], environ: Mapping[str, str], *, old_launcher: bool) -> int:
    problems: list[str] = []
    settings = read_settings(words, environ, problems, old_launcher=old_launcher)
    if settings is None:
        from phalanx._job.launch.manual import format_help  # here, because jobs do not need it

        guarded(lambda: print(format_help()))
        return 0
    if any(name in environ for name in SIGNS):
        from phalanx._job.launch.adopt import find_node, plan_node  # here: most commands run without a scheduler

        found = find_node(settings, environ)
        if found is not None:  # read again, now with the scheduler's values as defaults
            problems = []
            settings = read_settings(words, environ, problems, old_launcher=old_launcher, found=found) or settings
        return run_job(plan_node(settings, environ, problems, found))
    return run_job(plan_job(settings, environ, problems=problems))


def run_job(plan: JobPlan, joined: JoinedJob | None = None) -> int:
    """Run the planned job; return the exit code. No process of the job survives the call.

    `joined` is the connection to the first host, if `phalanx join` has already opened it.

    Raises:
        LaunchError: the log directory cannot be written, or the system refuses processes or descriptors.
    """
    if not SUPPORTED:
        show(
            2,
            f"phalanx run: {sys.platform} does not notify processes of their parent's death: processes may survive if "
            "this command is killed with SIGKILL, or if a rank starts daemons. On Linux none do.",
        )
    adopt_orphans()
    with caught_signals(signal.Signals[name] for name in _CAUGHT) as signals:
        try:
            zygote = ZygoteProcess(plan)
        except OSError as error:
            raise LaunchError(f"phalanx run: no process could be started: {limits.explain(error)}") from error
        try:
            if plan.settings.rendezvous is not None:  # here, because a job on one host does not need it
                from phalanx._job.hosts.start import run_with_other_hosts

                return run_with_other_hosts(plan, zygote, signals, joined)
            from phalanx._job.agent.job import run_to_end  # here, so that the zygote starts first

            return run_to_end(plan, zygote, signals)
        finally:
            zygote.close(kill_descendants([zygote.pid]))
