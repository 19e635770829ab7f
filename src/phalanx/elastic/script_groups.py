"""The groups that a script has made before `elastic.run` (`new_group`, a DeviceMesh's): formed again after a loss.

They stay the same Python objects, under the names by which a mesh finds them. A group is formed again of the ranks that
it had, by number, where all of these name it; one of all ranks is of all that there are. Any other is refused by name
in its next operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, _register_process_group
from torch.distributed import distributed_c10d

from phalanx.backend.create import open_transport
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.errors import PhalanxError
from phalanx.log import get_logger
from phalanx.transport.rehearsal import RehearsalTransport

_logger = get_logger(__name__)
Named = tuple[str, tuple[int, ...]]


def plan_groups(own: Sequence[Named], told: Sequence[Sequence[Named]]) -> list[bool]:
    """Which of a rank's groups are formed: those that all their members, by rank in `told`, have under one name."""
    return [all(group in told[member] for member in group[1]) for group in own]


@dataclass
class _Kept:
    """A group, and what torch has noted of it."""

    group: Any
    name: Any  # a string; for mypy a type of torch's
    ranks: tuple[int, ...]
    backend: str
    config: str
    tag: str
    tags: tuple[str, ...]


class ScriptGroups:
    """Those of this process, in the order in which they were made; `world` is the default group, which is not one."""

    def __init__(self, world: Any) -> None:
        noted = distributed_c10d._world
        self._rank, self._size = world.rank(), world.size()
        self._count = noted.group_count
        self._kept: list[_Kept] = []
        foreign = []
        for group, (backend, _) in noted.pg_map.items():
            if group is world:
                continue
            name = noted.pg_names[group]
            numbers = noted.pg_group_ranks[group]
            ranks = tuple(sorted(numbers, key=numbers.__getitem__))
            if not isinstance(group, PhalanxProcessGroup):
                foreign.append(f"{name!r} ({backend}, ranks {list(ranks)})")
                continue
            if not group.forms_again:
                continue
            tags = tuple(tag for tag, groups in noted.tags_to_pg.items() if any(one is group for one in groups))
            config, tag = noted.pg_backend_config[group], noted.pg_to_tag[group]
            self._kept.append(_Kept(group, name, ranks, backend, config, tag, tags))
        if foreign:
            _logger.warning(
                "phalanx.elastic: after a loss these groups can't be used, which are not of backend 'phalanx': %s. "
                "Make them in the function that is elastic.run.",
                ", ".join(foreign),
            )

    def name_all(self, rank: int, size: int) -> tuple[Named, ...]:
        """The groups that may be formed among `size` ranks of which this process is `rank`, with their members."""
        stays = (rank, size) == (self._rank, self._size)
        named = ((kept, self._members(kept, size)) for kept in self._kept)
        return tuple((kept.name, ranks) for kept, ranks in named if stays or self._is_of_all(kept))

    def _is_of_all(self, kept: _Kept) -> bool:
        return kept.ranks == tuple(range(self._size))

    def _members(self, kept: _Kept, size: int) -> tuple[int, ...]:
        return tuple(range(size)) if self._is_of_all(kept) else kept.ranks

    def form(self, world: Any, told: Sequence[Sequence[Named]]) -> None:
        """Let each group meet its members again; `told` is what the ranks of `world` have named. Collective."""
        rank, size = world.rank(), world.size()
        own = self.name_all(rank, size)
        formed = {named[0] for named, forms in zip(own, plan_groups(own, told), strict=True) if forms}
        _, default_store = distributed_c10d._world.pg_map[world]
        for kept in self._kept:
            ranks = self._members(kept, size)
            store = PrefixStore(f"{kept.name}/", default_store)
            number = ranks.index(rank) if rank in ranks else 0
            refusal = _RefusedTransport(kept.name, number, kept.ranks, self._size, size)
            if kept.name in formed:
                options = SimpleNamespace(
                    store=store, group_rank=number, group_size=len(ranks),
                    timeout=timedelta(seconds=kept.group._timeout_s), group_id=kept.name,
                    global_ranks_in_group=list(ranks),
                )  # fmt: skip
                kept.group.reconnect(
                    lambda options=options, kept=kept: open_transport(options, kept.group.backend_options),
                    refusal, store, number, len(ranks), ranks,
                )  # fmt: skip
            else:
                ranks = (rank,)  # torch asks which of them this process is, to tell of the refusal
                kept.group.reconnect(lambda refusal=refusal: refusal, refusal, store, 0, 1, ranks)
            _note(kept, store, ranks)
        distributed_c10d._world.group_count = max(self._count, distributed_c10d._world.group_count)


def _note(kept: _Kept, store: Any, ranks: Sequence[int]) -> None:
    """Have torch know the group again, which went with the default group."""
    noted, group = distributed_c10d._world, kept.group
    noted.pg_map[group] = (kept.backend, store)
    noted.pg_names[group] = kept.name
    noted.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    noted.pg_backend_config[group] = kept.config
    noted.pg_to_tag[group] = kept.tag
    for tag in kept.tags:
        noted.tags_to_pg.setdefault(tag, []).append(group)
    _register_process_group(kept.name, group)


class _RefusedTransport(RehearsalTransport):
    """Of a group that can't be formed again: the first thing that an operation does is refused."""

    def __init__(self, group: str, rank: int, ranks: Sequence[int], old_size: int, size: int) -> None:
        super().__init__(group, rank, len(ranks))
        self._why = f"group {group!r} of ranks {list(ranks)} was made for {old_size} ranks, before elastic.run"
        self._size = size

    def call_site(self, place: tuple[str, int]) -> int:
        """Refuse the operation.

        Raises:
            PhalanxError: always.
        """
        where = f" at {place[0]}:{place[1]}" if place[0] else ""
        raise PhalanxError(
            f"{self._why}, and is used{where} after a loss, among {self._size}, where its ranks are not those that it "
            "had.\nMake it in the function that is elastic.run, of ranks that are there: "
            "torch.distributed.new_group(...)."
        )
