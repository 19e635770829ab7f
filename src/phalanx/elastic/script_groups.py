"""Form the groups again after a loss that a script has made before `elastic.run` (`new_group`, a DeviceMesh's).

They stay the same Python objects, under the names by which a mesh finds them. A group is formed again of the ranks that
it had, by number, where all of these name it; one of all ranks is of all that there are. Any other is refused by name
in its next operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import PrefixStore

from phalanx._base.log import get_logger
from phalanx._comm.backend.create import open_transport
from phalanx._comm.backend.torch_integration import groups
from phalanx._comm.transport.rehearsal import RehearsalTransport
from phalanx.errors import PhalanxError

_logger = get_logger(__name__)
Named = tuple[str, tuple[int, ...]]


def plan_groups(own: Sequence[Named], told: Sequence[Sequence[Named]]) -> list[bool]:
    """Return which of a rank's groups are formed again: those that all members name alike, by `told`'s names."""
    return [all(group in told[member] for member in group[1]) for group in own]


class ScriptGroups:
    """`ScriptGroups` keeps the groups of this process other than `world`, the default one, in order of making."""

    def __init__(self, world: Any) -> None:
        self._rank, self._size = world.rank(), world.size()
        self._count = groups.count_groups()
        self._kept: list[groups.Registration] = []
        foreign = []
        for known in groups.list_registrations():
            if known.group is world:
                continue
            if groups.phalanx_group(known.group) is None:
                foreign.append(f"{known.name!r} ({known.backend}, ranks {list(known.ranks)})")
            else:
                self._kept.append(known)
        if foreign:
            _logger.warning(
                "phalanx.elastic: after a loss these groups can't be used, which are not of backend 'phalanx': %s. "
                "Make them in the function that is elastic.run.",
                ", ".join(foreign),
            )

    def name_all(self, rank: int, size: int) -> tuple[Named, ...]:
        """Return the groups that may be formed among `size` ranks, of which this is `rank`, with their members."""
        stays = (rank, size) == (self._rank, self._size)
        named = ((kept, self._members(kept, size)) for kept in self._kept)
        return tuple((kept.name, ranks) for kept, ranks in named if stays or self._is_of_all(kept))

    def _is_of_all(self, kept: groups.Registration) -> bool:
        return kept.ranks == tuple(range(self._size))

    def _members(self, kept: groups.Registration, size: int) -> tuple[int, ...]:
        return tuple(range(size)) if self._is_of_all(kept) else kept.ranks

    def form(self, world: Any, told: Sequence[Sequence[Named]]) -> None:
        """Form each group again from its members; `told` is what the ranks of `world` have named. All ranks call it."""
        rank, size = world.rank(), world.size()
        own = self.name_all(rank, size)
        formed = {named[0] for named, forms in zip(own, plan_groups(own, told), strict=True) if forms}
        default_store = groups.store_of(world)
        for kept in self._kept:
            ranks = self._members(kept, size)
            store = PrefixStore(f"{kept.name}/", default_store)
            number = ranks.index(rank) if rank in ranks else 0
            refuse = functools.partial(_RefusedTransport, kept.name, number, kept.ranks, self._size, size)
            ours = groups.phalanx_group(kept.group)
            assert ours is not None  # no other groups are kept
            if kept.name in formed:
                options = SimpleNamespace(
                    store=store, group_rank=number, group_size=len(ranks),
                    timeout=timedelta(seconds=ours._timeout_s), group_id=kept.name,
                    global_ranks_in_group=list(ranks),
                )  # fmt: skip
                opened = functools.partial(open_transport, options, ours.backend_options)
                ours.reconnect(opened, refuse(), store, number, len(ranks), ranks)
            else:
                ranks = (rank,)  # torch asks which rank of it this process is, for the words of the refusal
                ours.reconnect(refuse, refuse(), store, 0, 1, ranks)
            groups.register_again(kept, store, ranks)
        groups.count_groups_from(self._count)


class _RefusedTransport(RehearsalTransport):
    """`_RefusedTransport` carries a group that cannot be formed again: it refuses every operation at its first step."""

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
