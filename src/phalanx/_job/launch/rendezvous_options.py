"""Read the rendezvous options of `phalanx run`, with torchrun's meanings.

    --nnodes 2                                               at this host; it prints `phalanx join …` for the others
    --nnodes 2 --node-rank R --master-addr H --master-port P at H:P, led by node 0               (backend static)
    --nnodes 2 --rdzv-backend c10d --rdzv-endpoint H:P       at H:P, led by the host with address H

Under a scheduler, its allocation provides the number of hosts, this host's number and the address, unless options do.

The functions are pure: they do not inspect the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint, split_endpoint

if TYPE_CHECKING:
    from phalanx._job.schedulers.allocation import Allocation

STATIC_PORT = 29500  # torchrun's --master-port
C10D_PORT = 29400  # torchrun's --rdzv-endpoint without a port
_ETCD = ("etcd", "etcd-v2")


def decide_rendezvous(
    fields: Mapping[str, Any], problems: list[str], found: Allocation | None = None
) -> Rendezvous | None:
    """Return the rendezvous that `fields` describe, the values of options by name; None for a job on one host.

    The options override `found`, the scheduler's allocation. Append contradictions and impossible values to `problems`.
    """
    num_nodes, node = (1, 0) if found is None else (found.num_nodes, found.node)
    low, high = fields.get("nnodes", (num_nodes, num_nodes))
    backend = fields.get("rdzv-backend", "static")
    if backend in _ETCD:
        problems.append(
            f"--rdzv-backend {backend}: hosts connect to the first host, without an etcd server. Leave out the "
            "rendezvous options, and type the line that `phalanx run --nnodes N` prints on the other hosts; or give "
            "all hosts --rdzv-backend c10d --rdzv-endpoint HOST:PORT, with one of the hosts as HOST"
        )
        return None
    if backend not in ("static", "c10d"):
        problems.append(
            f"--rdzv-backend: must be static or c10d, got {backend!r}. Other backends exist only in torchrun"
        )
        return None
    has_address = bool(fields.keys() & {"rdzv-endpoint", "master-addr"})
    if found is not None and not low <= num_nodes <= high and (high == 1 or not has_address):
        nnodes = f"{low}" if low == high else f"{low}:{high}"
        problems.append(
            f"--nnodes {nnodes}, and {found.describe()} has {num_nodes}. Leave out --nnodes, or start as many nodes; "
            "--standalone makes each a job of its own."
        )
        return None
    if high == 1:
        if "witness" in fields:
            problems.append(
                "--witness: a job of one host cannot survive the loss of its host. Add --nnodes, or leave out --witness"
            )
        return None
    if fields.get("standalone"):
        problems.append("--standalone and --nnodes: a standalone job runs on one host. Leave out one of them")
        return None
    conf = fields.get("rdzv-conf", {})
    common: dict[str, Any] = {
        "min_nodes": low,
        "max_nodes": high,
        "local_addr": fields.get("local-addr", ""),
        **_read_conf(conf, backend, problems),
    }
    if "host-timeout" in fields:
        common["host_timeout_s"] = fields["host-timeout"]
    if "witness" in fields:
        common["witness"] = fields["witness"]
    endpoint = fields.get("rdzv-endpoint", "")
    # The hosts of an elastic job are numbered in the order of joining.
    number = node if found is not None and low == high else None
    if backend == "c10d":
        if not endpoint:
            return Rendezvous(leads=node == 0, node_rank=number, **common)
        host, port = split_endpoint(endpoint, C10D_PORT)
        return Rendezvous(join_endpoint(host, port), _read_bool(conf.get("is_host"), problems), **common)
    if low != high and (has_address or "node-rank" in fields):
        problems.append(
            f"--nnodes {low}:{high} with --node-rank or --master-addr: the number of hosts must be fixed if hosts "
            "have numbers. Give --nnodes N, or --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    node_rank = fields.get("node-rank", number)
    if node_rank is not None and node_rank >= high:
        problems.append(f"--node-rank: hosts are numbered from 0 to {high - 1} with --nnodes {high}, got {node_rank}")
    if not has_address:
        if fields.get("node-rank", node) != node:
            problems.append(
                f"--node-rank {node_rank}: needs the address of node 0. Give --master-addr HOST and --master-port "
                "PORT; or type the line that `phalanx run --nnodes N` prints on the first host"
            )
        if "master-port" in fields:
            endpoint = f":{fields['master-port']}"
        return Rendezvous(endpoint, leads=node == 0, node_rank=node_rank, **common)
    if endpoint:
        host, port = split_endpoint(endpoint, STATIC_PORT)
    else:
        host, port = fields["master-addr"], fields.get("master-port", STATIC_PORT)
    return Rendezvous(join_endpoint(host, port), leads=not node_rank, node_rank=node_rank or 0, **common)


def _read_conf(conf: Mapping[str, str], backend: str, problems: list[str]) -> dict[str, float]:
    """Return the time limits in --rdzv-conf; as in torchrun, unknown keys are ignored."""
    if conf.get("store_type", "tcp") != "tcp":
        problems.append(f"--rdzv-conf store_type={conf['store_type']}: hosts connect through the network; leave it out")
    # Each of torchrun's backends prefers one of these two.
    joins = ("join_timeout", "timeout") if backend == "static" else ("timeout", "join_timeout")
    names = {**dict.fromkeys(joins, "join_timeout_s"), "last_call_timeout": "last_call_s"}
    times = {field: _read_number(key, conf[key], problems) for key, field in names.items() if key in conf}
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        interval = _read_number("keep_alive_interval", conf.get("keep_alive_interval", "5"), problems)
        attempts = _read_number("keep_alive_max_attempt", conf.get("keep_alive_max_attempt", "3"), problems)
        times["host_timeout_s"] = max(1.0, interval * attempts)
    return times


def _read_number(key: str, text: str, problems: list[str]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e8:
        problems.append(f"--rdzv-conf {key}: must be a number, zero or more, got {text!r}")
        return 0.0
    return value


def _read_bool(text: str | None, problems: list[str]) -> bool | None:
    if text is None:
        return None
    word = text.lower()
    if word not in ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"):
        problems.append(f"--rdzv-conf is_host: must be true or false, got {text!r}")
    return word in ("1", "true", "t", "yes", "y")
