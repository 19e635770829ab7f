"""Lead a job on several hosts: run its attempts, and send the other hosts the result."""

from __future__ import annotations

from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import LOST_OUTPUT_EXIT_CODE, LedAttempt, run_attempts
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.gather import Gathering
from phalanx._job.hosts.succession.moved_job import JobMovedError
from phalanx.errors import LaunchError


def lead(
    plan: JobPlan,
    host: HostResources,
    gathering: Gathering,
    local_store: str,
    led: LedAttempt | None = None,
) -> int:
    """Run the job's attempts, beginning with `led` if this host has already run that one; return the exit code.

    The guard of `gathering` is closed on return.

    Raises:
        LaunchError: hosts cannot reach each other, or too few join in time.
        JobMovedError: another host already leads this job. All hosts that had joined were redirected.
    """

    def begin(restart_count: int) -> Attempt:
        return gathering.begin(restart_count, local_store)

    try:
        code = run_attempts(plan, host, begin, led)
    except LaunchError as error:
        gathering.end(error.exit_code, str(error))
        raise
    except JobMovedError:
        raise
    except BaseException:
        gathering.end(1, "the host that leads the job has failed")
        raise
    finally:
        gathering.guard.close()
    if gathering.has_left:
        return code
    gathering.end(code, "")
    gathering.guard.forget()
    return code or (0 if host.display.lost is None else LOST_OUTPUT_EXIT_CODE)
