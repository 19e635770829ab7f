"""Collect the states of all parts for a save, and agree with the other ranks on how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.checkpoint.manifest import Kind
from phalanx.checkpoint.nesting import NestingError
from phalanx.checkpoint.parts import buffer_names, describe_optimizers, states_of
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.tree import Tree, is_dtensor
from phalanx.checkpoint.write_problems import explain_optimizers_apart
from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class Collected:
    """It is what a rank has to save.

    `pinned` has the names of those values of which rank 0's counts where ranks differ.
    """

    state: dict[str, Any]
    kind: Kind
    pinned: set[str]


def collect(peers: Peers, parts: Mapping[str, Any], *, sharded: bool | None) -> Collected:
    """Return the state of all parts, and how all ranks write it. All ranks call it.

    Arguments:
        sharded: whether every rank writes its part; None lets the state decide.

    Raises:
        CheckpointError: a part has no state, or the parts can't be saved in this way; on every rank.
    """
    problem: str | None = None
    cause: Exception | None = None
    state: dict[str, Any] = {}
    without_values = ""
    pinned: set[str] = set()
    wants = sharded
    if wants is None:
        wants = any(hasattr(part, "shard_state_dict") and peers.world_size > 1 for part in parts.values())
    try:
        pinned = buffer_names(parts)
        state = states_of(parts, peers, sharded=wants)
        leaves = Tree.of(state).leaves
        has_shards = any(is_dtensor(leaf) for leaf in leaves.values())
        if has_shards and sharded is False and peers.world_size > 1:
            problem = (
                f"{peers.what}: the state holds tensors that are sharded over ranks (DTensor), of which rank 0 "
                "writes its own shard only. Leave out sharded=False."
            )
        wants = wants or (has_shards and sharded is None)
        without_values = next((name for name, leaf in leaves.items() if _has_no_values(leaf, name, pinned, peers)), "")
    except NestingError as error:
        problem, cause = (
            f"{peers.what} on rank {peers.rank}: {error}. Nothing was written. Save a state without it.",
            error,
        )
    except Exception as error:
        problem, cause = f"{peers.what} on rank {peers.rank}: {type(error).__name__}: {error}", error
    told = peers.all_gather((problem, wants, describe_optimizers(parts), without_values))
    first = next((text for text, *_ in told if text is not None), None)
    if first is not None:
        raise CheckpointError(first) from cause
    if apart := explain_optimizers_apart(peers.what, [optimizers for *_, optimizers, _ in told]):
        raise CheckpointError(apart)
    kind: Kind = "sharded" if any(wants for _, wants, *_ in told) else "whole"
    if kind == "sharded" and (empty := [(rank, name) for rank, (*_, name) in enumerate(told) if name]):
        rank, name = empty[0]
        raise CheckpointError(
            f"{peers.what}: {name!r} is on the meta device on rank {rank}, and has no values to write. Nothing was "
            "written. Give it values first (to_empty and its initialization), or leave it out of what is saved."
        )
    differing = [name for name, part in parts.items() if getattr(part, "ranks_differ", False)]
    if kind == "sharded" and differing and peers.world_size > 1:
        raise CheckpointError(
            f"{peers.what}: with {differing[0]!r} ranks train apart, and in a sharded checkpoint each part of the "
            "model would be of some other rank. Save with sharded=False on a CheckpointManager of each rank's own "
            "(process_group of one rank, a folder each), or after finish() without it."
        )
    return Collected(state, kind, pinned)


def _has_no_values(leaf: object, name: str, pinned: set[str], peers: Peers) -> bool:
    """Return whether this rank may have to write a tensor that is on the meta device."""
    return isinstance(leaf, Tensor) and leaf.is_meta and (peers.is_first or name not in pinned)
