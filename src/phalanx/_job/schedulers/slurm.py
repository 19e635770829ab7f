"""Read Slurm's variables for `srun phalanx run train.py`: each task is a node."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx._comm.rendezvous.launchers import slurm_launch
from phalanx._job.schedulers.allocation import Allocation, read_port


def find(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of a step of several tasks; None outside such a step, where this command runs once."""
    launch = slurm_launch(environ)
    if launch is None:
        return None
    variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if "SLURM_STEP_NUM_TASKS" not in environ:
        variables = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST")
    return Allocation(
        "Slurm",
        launch.rank,
        launch.world_size,
        launch.job,
        tuple(name for name in variables if name in environ),
        first_host=environ.get("MASTER_ADDR") or launch.first_host,
        port=read_port(environ, "MASTER_PORT", launch.port if environ.get("SLURM_STEP_RESV_PORTS") else 0),
        local_node=launch.local_rank,
        num_local_nodes=launch.local_size,
    )


def find_unused_hosts(environ: Mapping[str, str]) -> int:
    """Return how many hosts Slurm gave this job if this command uses only one of them; 0 if the job has one host."""
    if slurm_launch(environ) is not None or "SLURM_JOB_ID" not in environ:
        return 0
    # A step of one task may be in a larger job on purpose: other steps use the other hosts.
    is_body = environ.get("SLURM_STEP_ID", "") in ("", "batch", "4294967291", "4294967290", "interactive")
    hosts = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return int(hosts) if is_body and hosts.isdecimal() and int(hosts) > 1 else 0
