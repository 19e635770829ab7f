"""Make torch build a group of backend "mpi" with our code, though its wheel has no MPI.

torch's own code for the name asks `is_mpi_available()` and calls `ProcessGroupMPI.create(ranks)`, both looked up in its
module; what comes back is a process group, which becomes the group as it is. It hands over neither the store nor the
timeout, so they are taken here, one call earlier.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from phalanx.backend.create import leave_at_exit
from phalanx.backend.mpi.process_group import MpiProcessGroup
from phalanx.backend.mpi.start import start_together
from phalanx.backend.rendezvous import launcher, mpi_rendezvous, store_through_mpi
from phalanx.backend.torch_integration.groups import phalanx_group
from phalanx.coordination.bootstrap import exchange
from phalanx.coordination.rank_info import RankInfo, host_identity
from phalanx.deadline import Deadline
from phalanx.engines.mpi import MpiEngine, Runtime, start, why_not
from phalanx.errors import PhalanxError
from phalanx.ipc.local_listener import new_token
from phalanx.symmetric_memory.watch import ProcessId
from phalanx.transport.authentication import PickleAuthenticator
from phalanx.transport.mpi.operations import MpiTransport


def new_process_group(
    original: Callable[..., Any], offer: Callable[[Callable[[Any], Any]], None], *args: Any, **kwargs: Any
) -> Any:
    """Do as torch's `_new_process_group_helper`, for backend "mpi"; `offer` shows torch the function of the group.

    Raises:
        PhalanxError: there is no MPI, or the ranks are not in one MPI job; the same on every rank.
        DeadlineError: some rank never came; the message names it, on every rank that did.
    """
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    if str(asked["backend"]) != "mpi":
        raise ValueError(
            f'backend {asked["backend"]!r}: through mpi4py, "mpi" cannot be joined with other backends in one group.\n'
            'Use "mpi" alone, and make a group of its own for other devices.'
        )
    timeout: timedelta = asked["timeout"]
    name: str = asked["group_name"]
    ranks: Sequence[int] = asked["global_ranks_in_group"]
    deadline = Deadline.after(timeout)
    if not ranks:  # the group of all ranks: torch has neither asked who we are nor met anybody
        runtime, asked["store"], ranks = _join(name, deadline)
    elif dist.get_rank() in ranks:
        if not isinstance(phalanx_group(dist.group.WORLD), MpiProcessGroup):
            raise PhalanxError(
                f"new_group {name!r}: backend 'mpi' needs a job whose first group is MPI's, too.\n"
                "Call init_process_group('mpi') first."
            )
        runtime = start(launcher())
    else:
        return original(**asked)
    rank = list(ranks).index(runtime.rank)
    store = PrefixStore(f"{name}/mpi", asked["store"])
    infos = exchange(store, rank, len(ranks), _rank_info(), name, deadline).infos

    def create(_: Any) -> MpiProcessGroup:
        names = [f"pid {info.process.pid} on {info.hostname}" for info in infos]
        engine = MpiEngine(runtime, ranks, rank, timedelta(seconds=max(deadline.left_s, 0.1)))
        transport = MpiTransport(name, engine, names)
        if len({info.host for info in infos}) > 1:
            transport.pickles = PickleAuthenticator(infos[0].secret, name)
        return MpiProcessGroup(store, transport, rank, len(ranks), timeout, name, ranks)

    offer(create)
    made = original(**asked)
    leave_at_exit()
    return made


def _join(name: str, deadline: Deadline) -> tuple[Runtime, Any, Sequence[int]]:
    """Start MPI on all ranks; return it, a store for them, and their numbers."""
    here = f"init_process_group of group {name!r}"
    bootstrap = mpi_rendezvous(deadline)
    if bootstrap is not None:
        store, rank, size = bootstrap
    else:  # no mpiexec says who we are: alone, or started by something that only MPI understands
        if problem := why_not(launcher()):
            raise PhalanxError(f"{here} in process {os.getpid()}: no MPI.\n{problem}")
        runtime = start(launcher())
        rank, size = runtime.rank, runtime.size
        store = HashStore() if size == 1 else store_through_mpi(here, deadline)
    runtime, places = start_together(PrefixStore(f"{name}/start", store), rank, size, name, deadline)
    if places != list(range(size)):
        raise PhalanxError(
            f"{here} on rank {rank}: MPI numbers the ranks {places}, the launcher 0 to {size - 1}.\n"
            "Start the job with one mpiexec."
        )
    return runtime, store, range(size)


def _rank_info() -> RankInfo:
    return RankInfo(host_identity(), os.uname().nodename, "", ProcessId.of_self(), frozenset(), 0, secret=new_token())
