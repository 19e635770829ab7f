"""Create the `SaveWork` of a save: rank 0 writes the whole state, or every rank writes its part.

The state is copied here, before training continues; a `SaveWork` runs in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.background import SaveWork
from phalanx.checkpoint.history import Draft
from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RemoteDraft
from phalanx.checkpoint.snapshot import SnapshotMemory, copy_tree
from phalanx.checkpoint.structure import encode_structure, merge_structures
from phalanx.checkpoint.tree import Tree
from phalanx.checkpoint.whole import write_whole
from phalanx.checkpoint.write_problems import explain_unwritten

if TYPE_CHECKING:  # torch.distributed.checkpoint takes most of a second to import, so import it only when needed
    from phalanx.checkpoint.sharded import Plan, RankShard

Commit = Callable[[Mapping[str, FileRecord]], Path | str]


def whole_work(
    peers: Peers,
    place: Path | str,
    step: int,
    state: Mapping[str, Any],
    draft: Draft | RemoteDraft | None,
    memory: SnapshotMemory | None,
    commit: Commit,
) -> SaveWork:
    """Return this rank's work for a save to one file that rank 0 writes; only rank 0 has a draft. All ranks call this.

    If there is a `memory`, rank 0's state is first copied into it.

    Raises:
        CheckpointError: the state cannot be copied; on every rank.
    """
    problem, cause, content = None, None, state
    if memory is not None:
        try:
            content = copy_tree(state, memory) if draft is not None else state
        except Exception as error:
            problem, cause = explain_unwritten(peers, place, step, error, state), error
        peers.agree_with_first(problem, cause)
    if draft is None:
        return SaveWork(step, write=lambda: None)
    files: dict[str, FileRecord] = {}

    def write() -> None:
        files.update(write_whole(draft.path, content))
        draft.send()

    return SaveWork(step, write, lambda: commit(files), discard=draft.discard)


def sharded_work(
    peers: Peers,
    place: Path | str,
    step: int,
    state: Mapping[str, Any],
    tree: Tree,
    plan: Plan,
    draft: Draft | RemoteDraft,
    memory: SnapshotMemory | None,
    commit: Commit,
) -> SaveWork:
    """Return this rank's work for a save in which every rank writes its part of `tree`. All ranks call this.

    `tree` is the tree of `state`. If there is a `memory`, this rank's part is first copied into it.

    Raises:
        CheckpointError: a rank's part cannot be copied; on every rank.
    """
    from phalanx.checkpoint import sharded as sharded_files

    problem, cause, structure = None, None, b""
    pieces = sharded_files.SavedPieces()
    try:
        pieces = sharded_files.collect_pieces(plan, tree, memory)
        if peers.is_first or not plan.is_uniform:
            structure = encode_structure(tree)
    except Exception as error:
        problem, cause = explain_unwritten(peers, place, step, error, state), error
    peers.agree(problem, cause)
    aliases: Mapping[str, str] = tree.aliases
    if not plan.is_uniform:
        structure, aliases = merge_structures(peers.gather(structure))
    parts: dict[int, RankShard] = {}

    def write() -> None:
        parts[peers.rank] = sharded_files.write_part(draft.path, plan, pieces)
        draft.send()
        if not peers.is_first:
            draft.report(sharded_files.part_name(peers.rank), parts[peers.rank].encode())

    if not peers.is_first:
        return SaveWork(step, write, discard=draft.discard)
    others = {rank: sharded_files.part_name(rank) for rank in range(1, peers.world_size)}

    def write_metadata_and_commit() -> Path | str:
        for rank, name in others.items():
            parts[rank] = sharded_files.RankShard.decode(draft.read_report(name))
        ordered = [parts[rank] for rank in sorted(parts)]
        files = sharded_files.write_metadata(draft.path, plan, ordered, aliases, structure)
        draft.send()
        draft.remove_reports(tuple(others.values()))
        return commit(files)

    names = tuple(others.values())
    return SaveWork(step, write, write_metadata_and_commit, names, draft.missing, draft.max_poll_s, draft.discard)
