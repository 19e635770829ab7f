"""Run an agent that a program starts: it is `phalanx run`, but dies with its caller, which may have the last word."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

from phalanx._base.processes import die_with_parent
from phalanx._job.agent.verdict import Verdict
from phalanx._job.launch.command import plan_job
from phalanx._job.launch.command_line import parse
from phalanx._job.launch.run_job import run_job
from phalanx._job.output.standard import open_standard_descriptors
from phalanx._job.output.text import show
from phalanx.errors import LaunchError


def main() -> int:
    """Run the job described by sys.argv: CALLER VERDICT WORDS….

    Write the job's result to the file VERDICT; if VERDICT is empty, print it, as on the command line.
    """
    caller, verdict, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent(caller, signal.SIGTERM)
    open_standard_descriptors()
    try:
        settings = parse(words)
        assert settings is not None, "the caller has refused what is no job"
        plan = dataclasses.replace(plan_job(settings, os.environ), verdict=verdict)
        if verdict:
            Verdict(world_size=plan.num_ranks).write(verdict)  # so that the caller knows that it has begun
        return run_job(plan)
    except LaunchError as error:
        if verdict:
            Verdict(text=str(error)).write(verdict)
        else:
            show(2, str(error))
        return error.exit_code
    except KeyboardInterrupt:  # in the first moments, before signals are caught: nothing was started
        return 128 + signal.SIGINT
