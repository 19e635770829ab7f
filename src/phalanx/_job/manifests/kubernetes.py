"""Write a Kubernetes Job, and the Service by which its pods find each other."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from phalanx._job.agent.settings import USAGE_EXIT_CODE
from phalanx._job.manifests.request import JobRequest
from phalanx.errors import LaunchError

_PORT = 29400
_SHM = "8Gi"
_MOST_LOST_PODS = 6  # Kubernetes's default for a Job
_MAX_NAME = 52  # the pods' names, NAME-INDEX, are host names, with at most 63 characters
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True)
class KubernetesCluster:
    """A `KubernetesCluster` describes where the pods run, and their user.

    `secret` is the name of the Secret that has the job's key, in the field `key`. `user` is a numeric user ID; 0 is
    root, which a namespace with the restricted Pod Security Standard refuses. `shm` limits the size of files in
    /dev/shm, which count toward the pod's memory.
    """

    image: str
    namespace: str = ""
    secret: str = "phalanx-key"
    folder: str = ""
    user: int = 1000
    shm: str = ""


def write_manifest(request: JobRequest, cluster: KubernetesCluster) -> str:
    """Return a headless Service, by which the pods find each other, and an indexed Job with a pod for each node.

    Raises:
        LaunchError: Kubernetes would not accept a name or a quantity.
    """
    _check(request, cluster)
    documents = [_service(request, cluster), _job(request, cluster)]
    namespace = f" -n {cluster.namespace}" if cluster.namespace else ""
    header = [
        "# Written by: phalanx manifest kubernetes",
        "# Once, for the key that every connection between the pods needs:",
        "#   phalanx key",
        f"#   kubectl{namespace} create secret generic {cluster.secret} --from-file=key=$HOME/.config/phalanx/key",
        f"# Then: kubectl{namespace} apply -f FILE",
        f"# The output of all ranks: kubectl{namespace} logs -f -l batch.kubernetes.io/job-completion-index=0,"
        f"batch.kubernetes.io/job-name={request.name}",
    ]
    return "\n".join([*header, *("---\n" + _as_yaml(document) for document in documents)]) + "\n"


def _service(request: JobRequest, cluster: KubernetesCluster) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request, cluster),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "publishNotReadyAddresses": True,  # the pods look for each other before they are ready
            "ports": [{"name": "coordinator", "port": _PORT}],
        },
    }


def _job(request: JobRequest, cluster: KubernetesCluster) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if request.cpus:
        limits["cpu"] = str(request.cpus)
    if request.memory:
        limits["memory"] = request.memory
    if request.gpus:
        limits["nvidia.com/gpu"] = str(request.gpus)
    container: dict[str, Any] = {
        "name": "phalanx",
        "image": cluster.image,
        "command": ["phalanx", "run", *(word.replace("$", "$$") for word in request.run_words)],  # escapes $(X)
        **({"workingDir": cluster.folder} if cluster.folder else {}),
        "env": [
            {"name": "PET_NNODES", "value": str(request.nodes)},
            {"name": "MASTER_ADDR", "value": f"{request.name}-0.{request.name}"},
            {"name": "MASTER_PORT", "value": str(_PORT)},
            *([{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "phalanx"}] if cluster.user else []),
            {"name": "PHALANX_KEY", "valueFrom": {"secretKeyRef": {"name": cluster.secret, "key": "key"}}},
        ],
        "ports": [{"name": "coordinator", "containerPort": _PORT}],
        **({"resources": {"limits": limits}} if limits else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # For DataLoader workers, and the ranks' own memory. Files in a memory-backed volume count toward the pod's memory.
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shm or request.memory or _SHM}}
    user = cluster.user
    whom = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request, cluster),
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            # A single pod cannot be replaced, and `phalanx run --max-restarts` restarts all ranks. With a witness the
            # remaining pods continue, and must not be deleted because another pod has failed.
            "backoffLimit": _MOST_LOST_PODS if request.witness else 0,
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": request.name}},
                "spec": {
                    "subdomain": request.name,
                    "restartPolicy": "Never",
                    "securityContext": {**whom, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                    "volumes": [shm],
                },
            },
        },
    }


def _metadata(request: JobRequest, cluster: KubernetesCluster) -> dict[str, Any]:
    return {"name": request.name, **({"namespace": cluster.namespace} if cluster.namespace else {})}


def _check(request: JobRequest, cluster: KubernetesCluster) -> None:
    problems = []
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", request.name) or len(request.name) > _MAX_NAME:
        problems.append(
            f"--name {request.name!r}: the name of a job and its Service has lower-case letters, digits and dashes, "
            f"begins with a letter and has at most {_MAX_NAME} characters"
        )
    for option, name in (("--secret", cluster.secret), ("--namespace", cluster.namespace or "default")):
        label = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
        if not re.fullmatch(label if option == "--namespace" else rf"(?=.{{1,253}}$){label}(\.{label})*", name):
            problems.append(
                f"{option} {name!r}: a Kubernetes name has lower-case letters, digits and dashes, and begins and "
                "ends with a letter or digit"
            )
    if not cluster.image or cluster.image.split() != [cluster.image]:
        problems.append(f"--image {cluster.image!r}: name the image that has Phalanx and the script in it")
    for option, amount in (("--memory", request.memory), ("--shm", cluster.shm)):
        if amount and not _QUANTITY.fullmatch(amount):
            problems.append(f"{option} {amount!r}: must be a Kubernetes quantity, such as 64Gi or 512Mi")
    if problems:
        raise LaunchError("\n".join(f"phalanx manifest: {one}." for one in problems), exit_code=USAGE_EXIT_CODE)


def _as_yaml(value: Any, indent: int = 0) -> str:
    """Return YAML in block style; quote strings as in JSON, except plain words that YAML reads as strings."""
    pad = "  " * indent
    if isinstance(value, dict):
        return "\n".join(f"{pad}{key}:{_inner(one, indent + 1)}" for key, one in value.items())
    items = [_as_yaml(one, indent + 1).lstrip() if isinstance(one, dict) else _scalar(one) for one in value]
    return "\n".join(f"{pad}- {item}" for item in items)


def _inner(value: Any, indent: int) -> str:
    return "\n" + _as_yaml(value, indent) if isinstance(value, dict | list) else f" {_scalar(value)}"


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9/._-]*", value)
    return value if plain and value.lower() not in _WORDS else json.dumps(value, ensure_ascii=False)


_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", "none", "nan", "inf")
