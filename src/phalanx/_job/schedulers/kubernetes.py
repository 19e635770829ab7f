"""Read the variables of Kubernetes: an indexed Job with a headless Service, or Kubeflow's PyTorchJob and Trainer.

Each pod is a node.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx._job.schedulers.allocation import Allocation, read_port
from phalanx.errors import LaunchError

_PORT = 29400  # no other job uses the ports of a pod
_EQUAL = (  # variables with the same meaning, which must be equal
    ("RANK", "PET_NODE_RANK"),
    ("JOB_COMPLETION_INDEX", "PET_NODE_RANK"),
    ("JOB_COMPLETION_INDEX", "RANK"),
    ("MASTER_ADDR", "PET_MASTER_ADDR"),
    ("MASTER_PORT", "PET_MASTER_PORT"),
)


def is_kubeflow_pod(environ: Mapping[str, str]) -> bool:
    """Return whether PyTorchJob or Trainer has started this pod: its RANK is the pod's number, not a process's.

    Neither sets LOCAL_RANK: if it is set, a launcher inside the pod has started this process.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or environ.get("LOCAL_RANK"):
        return False
    address, rank, nodes = (environ.get(name, "") for name in _names(environ))
    return bool(address and rank.isdecimal() and nodes)


def _names(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the names of the variables with the first pod's address, this pod's number and the number of pods."""
    address = "MASTER_ADDR" if environ.get("MASTER_ADDR") else "PET_MASTER_ADDR"
    rank = "PET_NODE_RANK" if environ.get("PET_NODE_RANK") else "RANK"
    return address, rank, "PET_NNODES" if environ.get("PET_NNODES") else "WORLD_SIZE"


def find_kubeflow(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of PyTorchJob or Trainer; None outside their pods.

    Raises:
        LaunchError: the variables contradict each other.
    """
    if not is_kubeflow_pod(environ):
        return None
    address, rank, nodes = _names(environ)
    _compare(environ)
    port = "MASTER_PORT" if environ.get("MASTER_PORT") else "PET_MASTER_PORT"
    return Allocation(
        "Kubeflow",
        int(environ[rank]),
        _count(environ, nodes),
        environ.get("PET_RDZV_ID") or f"kubeflow-{environ[address]}",
        tuple(name for name in (rank, nodes, address, port) if environ.get(name)),
        first_host=environ[address],
        port=read_port(environ, port, _PORT),
    )


def find_indexed_job(environ: Mapping[str, str], fqdn: str, nnodes: int = 0) -> Allocation | None:
    """Return the allocation of an indexed Job; None outside one.

    Kubernetes does not publish the number of pods: it is `nnodes`, the value of --nnodes, or else PET_NNODES. `fqdn` is
    this host's full name, NAME-INDEX.SERVICE.NAMESPACE.svc… where the pods have a headless service.

    Raises:
        LaunchError: the number of pods, or the name of the first one, is unknown.
    """
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        return None
    _compare(environ)
    num_nodes = nnodes or (_count(environ, "PET_NNODES") if environ.get("PET_NNODES") else 0)
    if not num_nodes:
        raise LaunchError(
            f"phalanx run: JOB_COMPLETION_INDEX={index}: this is one pod of a Kubernetes indexed Job, and the number "
            "of pods is unknown. Set PET_NNODES in the Job's file, or give --nnodes (`phalanx manifest kubernetes` "
            "writes a file that has it). To start a separate job in each pod: phalanx run --standalone.",
            exit_code=2,
        )
    name, _, service = fqdn.partition(".")
    base = name.removesuffix(f"-{index}")
    variables = ["JOB_COMPLETION_INDEX", *(["PET_NNODES"] if environ.get("PET_NNODES") else [])]
    if environ.get("MASTER_ADDR"):
        first = environ["MASTER_ADDR"]
        variables.append("MASTER_ADDR")
    elif int(index) == 0:
        first = fqdn
    elif service and base != name:
        first = f"{base}-0.{service}"
    else:
        raise LaunchError(
            f"phalanx run: JOB_COMPLETION_INDEX={index}, but the address of the pod of index 0 is unknown: this pod "
            f"is {fqdn!r}, without the name of a headless Service. Set `subdomain` in the Job's pod template to "
            "such a Service, or MASTER_ADDR to the first pod's name; `phalanx manifest kubernetes` writes a file that "
            "has both.",
            exit_code=2,
        )
    return Allocation(
        "Kubernetes",
        int(index),
        num_nodes,
        f"kubernetes-{first.partition('.')[0].removesuffix('-0')}",  # the same in all pods, also on the host's network
        tuple(variables),
        first_host=first,
        port=read_port(environ, "MASTER_PORT", _PORT),
    )


def _compare(environ: Mapping[str, str]) -> None:
    problems = [
        f"{one}={environ[one]} and {other}={environ[other]}"
        for one, other in _EQUAL
        if environ.get(one) and environ.get(other) and environ[one] != environ[other]
    ]
    if problems:
        raise LaunchError(
            f"phalanx run: {'; '.join(problems)} in the environment contradict each other. "
            "Unset one of the two, or make them equal.",
            exit_code=2,
        )


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return the number of nodes in a variable; for MIN:MAX return MAX, because pods are numbered up to MAX."""
    text = environ[name].rpartition(":")[2]
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(
            f"phalanx run: {name}={environ[name]} in the environment: must be a number of nodes", exit_code=2
        )
    return int(text)
