"""Place parameters on servers: a dense tensor on one server, row r of a table on server r % num_servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# "step"; "dense" and "tables": tensors by name; "optimizer": optimizer states by name; "groups": the groups of "dense"
# and of "tables", each with its names ("params") and its options.
State = dict[str, Any]


def plan_dense(sizes: Mapping[str, int], num_servers: int, load: list[int] | None = None) -> dict[str, int]:
    """Return the server of each dense tensor: largest first, each on the least loaded server. Update `load`."""
    load = [0] * num_servers if load is None else load
    place = {}
    for name, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
        server = load.index(min(load))
        place[name] = server
        load[server] += size
    return place


def ring(servers: Sequence[str], index: int, host_of: Callable[[str], str]) -> list[str]:
    """Return the servers that may hold shard `index`: its own, then its successors in order.

    Successors on other hosts precede those on the same host, so that a replica survives the loss of a host.
    """
    mine, *others = (*servers[index:], *servers[:index])
    return [mine, *sorted(others, key=lambda other: host_of(other) == host_of(mine))]  # sorted is stable


def select_rows(table: Tensor, index: int, num_servers: int) -> Tensor:
    """Return the table's rows on server `index`."""
    if table.is_sparse:  # such as the momentum buffer of SGD
        ids, values = table._indices(), table._values()
        here = ids[0] % num_servers == index
        shape = (len(range(index, len(table), num_servers)), *table.shape[1:])
        return _sparse(ids[:, here] // num_servers, values[here], shape, table.is_coalesced())
    return table[index::num_servers].clone()


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the whole table from the rows on each server."""
    num_rows = sum(len(part) for part in parts)
    if parts[0].is_sparse:
        ids = torch.cat([part._indices() * len(parts) + index for index, part in enumerate(parts)], 1)
        values = torch.cat([part._values() for part in parts])
        order = ids[0].argsort(stable=True)  # by row, the order in which torch adds sparse tensors
        is_coalesced = all(part.is_coalesced() for part in parts)
        return _sparse(ids[:, order], values[order], (num_rows, *parts[0].shape[1:]), is_coalesced)
    table = parts[0].new_empty((num_rows, *parts[0].shape[1:]))
    for index, part in enumerate(parts):
        table[index :: len(parts)] = part
    return table


def _sparse(ids: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    """Return a sparse tensor with these entries; `is_coalesced` affects the order in which they are added later."""
    return torch.sparse_coo_tensor(
        ids, values, shape, device=values.device, check_invariants=False, is_coalesced=is_coalesced
    )


def split_state(state: State, place: Mapping[str, int], num_servers: int) -> list[State]:
    """Split a complete state into one per server."""
    shards: list[State] = []
    tables: Mapping[str, Tensor] = state["tables"]
    for index in range(num_servers):
        dense = {name: value for name, value in state["dense"].items() if place[name] == index}
        kept = {}
        for name, values in state["optimizer"].items():
            if name in dense:
                kept[name] = values
            elif name in tables:
                rows = len(tables[name])
                kept[name] = {
                    key: select_rows(one, index, num_servers) if _is_by_row(one, rows) else one
                    for key, one in values.items()
                }
        own = {name: select_rows(table, index, num_servers) for name, table in tables.items()}
        groups = {"groups": state["groups"]} if "groups" in state else {}  # an older state has none
        shards.append({"step": state["step"], "dense": dense, "tables": own, "optimizer": kept, **groups})
    return shards


def join_states(shards: Sequence[State]) -> State:
    """Join the states of all servers; the inverse of `split_state`."""
    first = shards[0]
    dense = {name: value for shard in shards for name, value in shard["dense"].items()}
    kept: dict[str, Any] = {
        name: values for shard in shards for name, values in shard["optimizer"].items() if name in shard["dense"]
    }
    for name, table in first["tables"].items():
        if name in first["optimizer"]:
            kept[name] = {
                key: join_rows([shard["optimizer"][name][key] for shard in shards])
                if _is_by_row(one, len(table))
                else one
                for key, one in first["optimizer"][name].items()
            }
    tables = {name: join_rows([shard["tables"][name] for shard in shards]) for name in first["tables"]}
    joined = {"step": first["step"], "dense": dense, "tables": tables, "optimizer": kept}
    if "groups" in first:  # dense options from a server with a dense parameter: its optimizer may have set some itself
        with_dense = next((shard for shard in shards if shard["dense"]), first)
        joined["groups"] = {"dense": with_dense["groups"]["dense"], "tables": first["groups"]["tables"]}
    return joined


def _is_by_row(value: Any, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == num_rows
