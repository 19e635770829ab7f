"""Read TF_CONFIG's cluster as the hosts of a job; pure functions.

    TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:5000", "10.0.0.2:5000"]}, "task": {"type": "worker", "index": 1}}'

is host 1 of 2, whose rendezvous is at 10.0.0.1, port 5000. A chief is the first host. TensorFlow has one process for
each task, which uses all devices of its host; here each task starts a rank for each device of its host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cluster:
    """A `Cluster` is this task's place among the training tasks: `index` in `tasks`, which are "host:port"."""

    tasks: tuple[str, ...]
    index: int

    def run_options(self) -> tuple[str, ...]:
        """Return the equivalent options of `phalanx run`."""
        host, _, port = self.tasks[0].rpartition(":")
        where = ("--master-addr", host.strip("[]"), "--master-port", port)
        return ("--nnodes", str(len(self.tasks)), "--node-rank", str(self.index), *where)


def read_tf_config(called: str, text: str) -> Cluster | None:
    """Parse `text`, the value of TF_CONFIG; None if it is empty, or names only one task.

    Raises:
        ValueError: `text` is invalid, or has tasks of unsupported types; the message lists all problems.
    """
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{called}: TF_CONFIG is not JSON: {error}") from None
    cluster = config.get("cluster", {}) if isinstance(config, dict) else None
    task = config.get("task", {}) if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ValueError(f"{called}: TF_CONFIG must be an object with a 'cluster' and a 'task', got {text!r}")
    if not cluster:
        return None
    problems = _find_problems(cluster, task)
    if problems:
        raise ValueError(f"{called}: TF_CONFIG: " + "; ".join(problems))
    tasks = (*cluster.get("chief", ()), *cluster.get("worker", ()))
    index = int(task["index"]) + (len(cluster.get("chief", ())) if task["type"] == "worker" else 0)
    return Cluster(tasks, index) if len(tasks) > 1 else None


def _find_problems(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    problems = []
    if "ps" in cluster:
        problems.append("it has tasks 'ps': start the script with `phalanx run`, and take ParameterServerStrategy")
    if unknown := sorted(cluster.keys() - {"chief", "worker", "ps", "evaluator"}):
        problems.append(f"there are no tasks {', '.join(map(repr, unknown))}, only 'chief' and 'worker'")
    for kind in ("chief", "worker"):
        addresses = cluster.get(kind, [])
        if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
            return [*problems, f"{kind!r} must be a list of 'host:port', got {addresses!r}"]
        wrong = [one for one in addresses if not one.rpartition(":")[0] or not one.rpartition(":")[2].isdecimal()]
        problems += [f"{one!r} is not 'host:port'" for one in wrong]
    if len(cluster.get("chief", ())) > 1:
        problems.append("there is one chief at most")
    role, index = task.get("type"), task.get("index")
    if role == "evaluator":
        problems.append(
            "this task is the evaluator, which does not train: evaluate in the script, or start it by itself"
        )
    elif role not in ("chief", "worker"):
        problems.append(f"task.type must be 'chief' or 'worker', got {role!r}")
    elif not str(index).isdecimal() or int(str(index)) >= len(cluster.get(role, ())):
        problems.append(f"task.index {index!r} is none of the {len(cluster.get(role, ()))} of {role!r}")
    return problems
