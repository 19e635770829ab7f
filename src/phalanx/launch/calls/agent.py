"""The agent of a call: `phalanx run`, but that it dies with the caller, who has the last word."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

from phalanx.errors import LaunchError
from phalanx.launch.agent.agent import run_job
from phalanx.launch.calls.verdict import Verdict
from phalanx.launch.command import plan_job
from phalanx.launch.output.standard import open_standard_descriptors
from phalanx.launch.processes import die_with_parent
from phalanx.launch.settings import parse


def main() -> int:
    """`python -m phalanx.launch.calls.agent CALLER VERDICT WORDS…`: run the job that the words describe."""
    caller, verdict, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent(caller, signal.SIGTERM)
    open_standard_descriptors()
    try:
        settings = parse(words)
        assert settings is not None, "the caller has refused what is no job"
        plan = dataclasses.replace(plan_job(settings, os.environ), verdict=verdict)
        Verdict(world_size=plan.num_ranks).write(verdict)
        return run_job(plan)
    except LaunchError as error:
        Verdict(text=str(error)).write(verdict)
        return error.exit_code
    except KeyboardInterrupt:  # in the first moments, before signals are caught: nothing was started
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
