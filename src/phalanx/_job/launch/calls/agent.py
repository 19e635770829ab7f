"""Run the agent of a call: it runs a job like `phalanx run`, ends when the caller dies, and writes the job's result."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path

from phalanx._base.processes import die_with_parent
from phalanx._job.agent.job_result import JobResult
from phalanx._job.agent.settings import Settings
from phalanx._job.launch.calls.rank import RESULT, SETTINGS
from phalanx._job.launch.command import run_job
from phalanx._job.launch.plan_job import plan_job
from phalanx._job.output.standard import open_standard_descriptors
from phalanx.errors import LaunchError


def main() -> int:
    """Run the job of the call in the folder sys.argv[2], for the caller with pid sys.argv[1]; return the exit code."""
    caller, folder = int(sys.argv[1]), sys.argv[2]
    die_with_parent(caller, signal.SIGTERM)
    open_standard_descriptors()
    result = os.path.join(folder, RESULT)
    settings: Settings = pickle.loads(Path(folder, SETTINGS).read_bytes())
    try:
        plan = replace(plan_job(settings, os.environ), result_path=result)
        JobResult(world_size=plan.num_ranks).write(result)  # the job has begun
        return run_job(plan)
    except LaunchError as error:
        JobResult(text=str(error)).write(result)
        return error.exit_code
    except KeyboardInterrupt:  # before signals are handled: nothing was started
        return 128 + signal.SIGINT
