"""Connect the ranks of all hosts: build the engine that the group's options ask for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from phalanx.coordination.rank_info import RankInfo
from phalanx.deadline import Deadline
from phalanx.diagnostics.rank_list import name_ranks
from phalanx.engines.engine import Engine
from phalanx.engines.gloo import GlooEngine
from phalanx.errors import PhalanxError
from phalanx.transport.hierarchical.layout import Layout
from phalanx.transport.options import Options

_LONGEST_S = 1e8  # three years: "for ever", in a number of milliseconds that Gloo can hold


def build_engine(
    store: Any,
    bootstrap: str,
    infos: Sequence[RankInfo],
    layout: Layout,
    settings: Options,
    name: str,
    deadline: Deadline,
) -> Engine:
    """Collective over the group's ranks, which have met. `bootstrap` is a word that only they know.

    Raises:
        PhalanxError: the ranks cannot reach each other in this way; the message says where they are.
    """
    rank, size = layout.rank, len(infos)
    ctx = timedelta(seconds=min(max(deadline.left_s, 0.1), _LONGEST_S))
    if settings.engine == "mpi":
        from phalanx.backend.mpi.start import start_together  # not at the top: it is for those who have mpi4py
        from phalanx.engines.mpi import MpiEngine

        runtime, places = start_together(PrefixStore(f"mpi/{bootstrap}", store), rank, size, name, deadline)
        try:
            return MpiEngine(runtime, places, rank, ctx)
        except RuntimeError as error:
            raise PhalanxError(
                f"init_process_group of group {name!r} on rank {rank}: no communicator from {runtime.vendor}: "
                f"{error}.\nDestroy groups that are no longer used."
            ) from None
    try:
        return GlooEngine(
            PrefixStore(f"gloo/{bootstrap}", store),
            rank,
            size,
            ctx,
            address=infos[rank].address,
            interface=settings.interface or "",
        )
    except RuntimeError as error:
        raise _unreachable(error, infos, layout, name) from None


def _unreachable(error: RuntimeError, infos: Sequence[RankInfo], layout: Layout, name: str) -> PhalanxError:
    """Gloo could not connect this rank with all others: who was to be reached where."""
    hosts = "\n".join(
        f"  {name_ranks(list(host))}: {infos[host[0]].hostname} at {infos[host[0]].address or 'an unknown address'}"
        for host in layout.topology.hosts
    )
    return PhalanxError(
        f"init_process_group of group {name!r} on rank {layout.rank}: the ranks' hosts cannot all reach each other.\n"
        f"{hosts}\nGloo said: {error}\n"
        "Check that these addresses can be reached from each host (firewall, loopback address); choose another with "
        "pg_options=phalanx.Options(interface=...)."
    )
