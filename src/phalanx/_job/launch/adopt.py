"""Plan one node of a job that a scheduler has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.settings import Settings
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint
from phalanx._job.launch.devices import count_gpus
from phalanx._job.launch.plan_job import plan_job
from phalanx._job.output.standard import show
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.find import find_allocation
from phalanx._job.schedulers.kubernetes import is_kubeflow_pod
from phalanx._job.schedulers.rendezvous import find_rendezvous
from phalanx._job.schedulers.slurm import find_unused_hosts

# Variables with these prefixes identify this command's process, and would be wrong in a rank.
_OF_ONE_PROCESS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "HYDI_", "HYDRA_")


def plan_node(settings: Settings, environ: Mapping[str, str], problems: list[str], found: Allocation | None) -> JobPlan:
    """Return the plan of this node's part of the job, or of the whole job if it is not one of several nodes.

    The node waits for the others only after it has checked that it can run its part. `settings` were read with `found`,
    and `problems` are the problems of the command line.

    Raises:
        LaunchError: lists all problems; or the first node cannot be found.
    """
    if found is None:
        # Kubeflow sets RANK to a pod's number, not a process's, even in a job of one pod.
        own_environ = _without_process(environ, "Kubeflow") if is_kubeflow_pod(environ) else environ
        return plan_job(settings, own_environ, problems=problems)
    own, remaining = adopt(settings, environ, found)
    plan = plan_job(own, remaining, problems=problems)
    return plan if has_own_endpoint(settings, found) else complete_rendezvous(plan, environ, found)


def find_node(settings: Settings, environ: Mapping[str, str]) -> Allocation | None:
    """Return the scheduler's allocation if this command is one of several nodes; None if it is the only node.

    --standalone overrides the scheduler. If Slurm gave the job more hosts than this command uses, print a line.

    Raises:
        LaunchError: the scheduler's variables contradict each other.
    """
    if settings.standalone:
        return None
    rendezvous = settings.rendezvous
    found = find_allocation(environ, nnodes=rendezvous.max_nodes if rendezvous else 0)
    if found is None and rendezvous is None and (unused := find_unused_hosts(environ)):
        show(
            2,
            f"phalanx run: Slurm gave this job {unused} hosts, but this command, started once, uses only one. "
            "To use all: srun --ntasks-per-node=1 phalanx run …",
        )
    return found


def has_own_endpoint(settings: Settings, found: Allocation) -> bool:
    """Return whether the user's options name a rendezvous endpoint: options override the scheduler.

    Kubeflow's PET_ variables are read as options, too. Options that equal the allocation override nothing.
    """
    rendezvous = settings.rendezvous
    if rendezvous is None or not rendezvous.endpoint or rendezvous.endpoint.startswith(":"):
        return False
    own = rendezvous.endpoint, rendezvous.node_rank, rendezvous.min_nodes, rendezvous.max_nodes
    return own != (join_endpoint(found.first_host, found.port), found.node, found.num_nodes, found.num_nodes)


def adopt(settings: Settings, environ: Mapping[str, str], found: Allocation) -> tuple[Settings, dict[str, str]]:
    """Return the settings and the environment of node `found`."""
    remaining = _without_process(environ, found.scheduler)
    own = replace(settings, share=(found.local_node, found.num_local_nodes))
    if not has_own_endpoint(settings, found):
        own = replace(own, run_id=settings.run_id or found.job)
        remaining.pop("PHALANX_KEY", None)  # only `complete_rendezvous` reads it; the ranks must not inherit it
    if found.num_local_nodes > 1:
        remaining |= share_gpus(remaining, found, count_gpus(remaining))
    return own, remaining


def complete_rendezvous(plan: JobPlan, environ: Mapping[str, str], found: Allocation) -> JobPlan:
    """Find the endpoint of the rendezvous, and return the plan with it; node 0 prints the endpoint.

    Raises:
        LaunchError: there is no key, or the first node cannot be found.
    """
    rendezvous = plan.settings.rendezvous
    assert rendezvous is not None
    found = replace(found, job=plan.run_id)
    if rendezvous.endpoint.startswith(":"):  # --master-port, without an address
        found = replace(found, port=int(rendezvous.endpoint[1:]))
    rendezvous, job = find_rendezvous(found, plan.settings.key_file, environ, rendezvous)
    if found.node == 0:
        hint = f". Start it on every host: {found.hint}" if found.hint else ""
        show(2, f"phalanx run: {replace(found, job=job).describe()}; rendezvous {_describe_place(rendezvous)}{hint}")
    return replace(plan, run_id=job, settings=replace(plan.settings, rendezvous=rendezvous, run_id=job))


def _describe_place(rendezvous: Rendezvous) -> str:
    if rendezvous.is_local:
        return "on this host, without a port"
    if rendezvous.endpoint.startswith(":"):
        return f"at port {rendezvous.endpoint[1:]} of this host"
    # The coordinator listens on the first of the job's ports that is free.
    return f"at {rendezvous.endpoint}{', if that port is free' * bool(rendezvous.more_endpoints)}"


def share_gpus(environ: Mapping[str, str], found: Allocation, num_gpus: int) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for one of several nodes on this host.

    The result is empty if the scheduler has bound each node to its own GPUs, or if there are fewer GPUs than nodes.
    `num_gpus` of the host's GPUs are visible. Slurm sets the variable to the job's GPUs in every task, unless it binds
    each task to some of them; jsrun always binds.
    """
    node, num_nodes = found.local_node, found.num_local_nodes
    on_host = environ.get("SLURM_GPUS_ON_NODE", "")
    is_bound = (
        bool(environ.keys() & {"SLURM_GPUS_PER_TASK", "JSM_NAMESPACE_RANK"})
        or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or (on_host.isdecimal() and num_gpus < int(on_host))
    )
    if num_gpus < num_nodes or is_bound:
        return {}
    visible = environ["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in environ else range(num_gpus)
    mine = visible[num_gpus * node // num_nodes : num_gpus * (node + 1) // num_nodes]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}


def _without_process(environ: Mapping[str, str], scheduler: str) -> dict[str, str]:
    """Return the variables without those that identify only this process.

    RANK and WORLD_SIZE are removed only under Kubeflow, where they number the pods.
    """
    exact = ("RANK", "WORLD_SIZE") if scheduler == "Kubeflow" else ()
    return {
        name: value for name, value in environ.items() if not name.startswith(_OF_ONE_PROCESS) and name not in exact
    }
