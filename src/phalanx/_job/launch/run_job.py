"""Run the agent: start the zygote first, and load everything else while the zygote imports torch."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from phalanx._base.ipc.signals import caught_signals
from phalanx._base.processes import adopt_orphans, kill_descendants
from phalanx._job.agent import limits
from phalanx._job.agent.environment import plan_zygote_environment
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.target import may_train
from phalanx._job.agent.title import count_room
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from phalanx._job.hosts.first_host import JoinedJob

_CAUGHT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT", "SIGCHLD")


def run_job(plan: JobPlan, joined: JoinedJob | None = None) -> int:
    """Start the job and see it through; returns the command's exit code. No process of the job outlives the call.

    `joined` is the way to the first host, where `phalanx join` has found it already.

    Raises:
        LaunchError: the log directory cannot be written, or the system refuses processes or descriptors.
    """
    adopt_orphans()
    with caught_signals(signal.Signals[name] for name in _CAUGHT) as signals:
        environment = plan_zygote_environment(plan.environment, plan.placement.threads)
        preload = plan.settings.preload and plan.settings.target.kind != "program"
        warm = preload and (bool(plan.settings.max_restarts) or may_train(plan.settings.target))
        try:
            room = count_room(plan.settings.target.command)
            has_hosts = plan.settings.rendezvous is not None
            zygote = ZygoteProcess(environment, preload=preload, warm=warm, room=room, tells=has_hosts)
        except OSError as error:
            raise LaunchError(f"phalanx run: no process could be started: {limits.explain(error)}") from error
        try:
            if plan.settings.rendezvous is not None:  # a job on one host needs nothing of this
                from phalanx._job.hosts.start import run_with_other_hosts

                return run_with_other_hosts(plan, zygote, signals, joined)
            from phalanx._job.agent.job import run_to_end  # here, because it takes time that the zygote needs too

            return run_to_end(plan, zygote, signals)
        finally:
            zygote.close(kill_descendants([zygote.pid]))
