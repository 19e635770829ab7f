"""Complete the settings of `phalanx run` from a scheduler's variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from phalanx._job.agent.settings import Settings
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.launch.devices import count_gpus
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.find import find_allocation
from phalanx._job.schedulers.meet import meet
from phalanx._job.schedulers.slurm import find_unused_hosts
from phalanx.errors import LaunchError

# These identify a process, not a job: they are meant for this command, and wrong in a rank.
_OF_ONE_PROCESS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "HYDI_", "HYDRA_", "RANK", "WORLD_SIZE")


def adopt(
    settings: Settings, environ: Mapping[str, str], say: Callable[[str], object]
) -> tuple[Settings, dict[str, str]]:
    """Return the settings and environment of this node of the job; both unchanged if there is only one node.

    The user's options override the scheduler: --standalone, or where the hosts meet. Node 0 prints a line on the
    result.

    Raises:
        LaunchError: the scheduler's variables contradict each other or the options, or the nodes cannot meet.
    """
    asked = settings.rendezvous
    if settings.standalone:
        return settings, dict(environ)
    found = find_allocation(environ, nnodes=asked.max_nodes if asked else 0)
    if found is None:
        if asked is None and (unused := find_unused_hosts(environ)):
            say(
                f"phalanx run: Slurm gave this job {unused} hosts, and this command, started once, uses one. "
                "On all of them: srun --ntasks-per-node=1 phalanx run …"
            )
        return settings, dict(environ)
    told = environ
    environ = _without_process(environ, found)
    if asked is not None and asked.endpoint and not asked.endpoint.startswith(":"):
        return settings, environ  # the user's options decide
    if asked is not None and not asked.min_nodes <= found.num_nodes <= asked.max_nodes:
        raise LaunchError(
            f"phalanx run: --nnodes {asked.max_nodes}, and {found.describe()} has {found.num_nodes}. "
            "Leave --nnodes out, or start as many.",
            exit_code=2,
        )
    found = replace(found, job=settings.run_id or found.job)
    rendezvous, job = meet(found, settings.key_file, told, asked or Rendezvous())
    if found.node == 0:
        hint = f". It is to be started on every host: {found.hint}" if found.hint else ""
        say(f"phalanx run: {replace(found, job=job).describe()}; they meet {_describe_place(rendezvous)}{hint}")
    nproc = found.nproc if found.nproc and settings.nproc == "auto" else settings.nproc
    shared = _share_gpus(environ, found)
    return (
        replace(
            settings,
            rendezvous=rendezvous,
            nproc=nproc,
            run_id=job,
            share=(found.local_node, found.num_local_nodes),
        ),
        # The key is in the settings now; the ranks' children need not inherit it.
        {**{name: value for name, value in environ.items() if name != "PHALANX_KEY"}, **shared},
    )


def _describe_place(rendezvous: Rendezvous) -> str:
    if rendezvous.is_local:
        return "on this host, without a port"
    if rendezvous.endpoint.startswith(":"):
        return f"at port {rendezvous.endpoint[1:]} of this host"
    # The coordinator will find out which of the job's ports is free.
    return f"at {rendezvous.endpoint}{', if that port is free' * bool(rendezvous.more_endpoints)}"


def _share_gpus(environ: Mapping[str, str], found: Allocation) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for one of several nodes on this host, unless it is set."""
    if found.num_local_nodes == 1 or "CUDA_VISIBLE_DEVICES" in environ:
        return {}
    gpus, node, num_nodes = count_gpus(environ), found.local_node, found.num_local_nodes
    if gpus < num_nodes:
        return {}
    mine = range(gpus * node // num_nodes, gpus * (node + 1) // num_nodes)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}


def _without_process(environ: Mapping[str, str], found: Allocation) -> dict[str, str]:
    """Return variables without those that belong to this process alone; RANK is one of them only under Kubeflow."""
    names = _OF_ONE_PROCESS if found.scheduler == "Kubeflow" else _OF_ONE_PROCESS[:-2]
    return {name: value for name, value in environ.items() if not name.startswith(names) or name == "RANKS"}
