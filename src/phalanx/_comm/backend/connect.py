"""Connect the ranks of all hosts: build the engine that the group's options select."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import find_shortage
from phalanx._base.loss_detection import CHECK_S
from phalanx._base.threads import call_in_thread
from phalanx._comm.backend.rendezvous import launcher
from phalanx._comm.diagnostics.failure_report import FailedOperation, FailureReport
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.engines.engine import Engine, timedelta_of
from phalanx._comm.engines.gloo import GlooEngine
from phalanx._comm.rendezvous.bootstrap import check_formation
from phalanx._comm.rendezvous.rank_info import RankInfo
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.options import Options
from phalanx.errors import DeadlineError, PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.engines.mpi import Runtime

_SPARE_DESCRIPTORS = 64  # for files that the process opens while the group connects


@dataclass(frozen=True)
class RendezvousGroup:
    """A `RendezvousGroup` is a group after its rendezvous. Only its ranks use the keys of `store` that have `key`."""

    name: str
    key: str
    store: Any
    infos: Sequence[RankInfo]
    layout: Layout

    @property
    def rank(self) -> int:
        return self.layout.rank

    def prefixed(self, what: str) -> PrefixStore:
        return PrefixStore(f"{what}/{self.key}", self.store)


def build_engine(group: RendezvousGroup, settings: Options, deadline: Deadline, failure_store: FailureStore) -> Engine:
    """Build the engine that the group's options select. All ranks of the group call it.

    Raises:
        PhalanxError: the ranks cannot connect with this engine; the message has their addresses.
        PeerLostError: another rank was lost or interrupted meanwhile.
    """
    if settings.engine == "mpi":
        # imported here, since it needs mpi4py
        from phalanx._comm.engines.mpi import MpiEngine

        rank, size = group.rank, len(group.infos)
        runtime, places = start_mpi_together(group.prefixed("mpi"), rank, size, group.name, deadline)
        try:
            return MpiEngine(runtime, places, rank, timedelta_of(deadline, 0.1))
        except RuntimeError as error:
            raise PhalanxError(
                f"init_process_group of group {group.name!r} on rank {rank}: {runtime.vendor} created no communicator: "
                f"{error}.\nDestroy groups that are no longer used."
            ) from None
    from phalanx._comm.transport.hierarchical.bruck import leader_peers  # imported here, since it needs the C core

    # with one rank on each host, the group runs Gloo's own collectives, one at a time
    num_threads = int(group.layout.has_one_rank_each)
    peers = leader_peers(group.layout)
    return open_gloo(group, settings, deadline, failure_store, num_threads=num_threads, stream_peers=peers)


def open_gloo(
    group: RendezvousGroup,
    settings: Options,
    deadline: Deadline,
    failure_store: FailureStore,
    *,
    num_threads: int = 0,
    stream_peers: Sequence[int] = (),
) -> GlooEngine:
    """Connect all ranks through Gloo, whichever engine is selected; raise the errors of `build_engine`.

    `stream_peers` are the ranks with which this rank exchanges short messages.
    """
    rank, infos, name = group.rank, group.infos, group.name
    size = len(infos)

    def notify_others(reason: str) -> None:
        processes = {rank: f"pid {infos[rank].process.pid} on {infos[rank].hostname} {infos[rank].address}".rstrip()}
        reason = f"{reason} in init_process_group"
        failure_store.linger(failure_store.post(FailureReport("interrupted", (rank,), processes, reason=reason)))

    if shortage := find_shortage(size + len(stream_peers) + _SPARE_DESCRIPTORS):  # Gloo would abort the process
        notify_others("too few open files for all connections")
        raise PhalanxError(
            f"init_process_group of group {name!r} on rank {rank}: Gloo connects every pair of its {size} ranks. "
            f"{shortage}"
        )

    def connect() -> GlooEngine:
        address, interface = infos[rank].address, settings.interface or ""
        prefixed, left = group.prefixed("gloo"), timedelta_of(deadline, 0.1)
        return GlooEngine(
            prefixed,
            rank,
            size,
            left,
            address=address,
            interface=interface,
            num_threads=num_threads,
            stream_peers=stream_peers,
            secret=infos[0].secret,
        )

    def check_others() -> None:
        report = failure_store.report()
        if report is None and (server := failure_store.server_state()) and server[1] == "ended":
            who = server[0]
            processes = {who: f"pid {infos[who].process.pid} on {infos[who].hostname}"}
            report = FailureReport("lost", (who,), processes, reason="it served the job's store, which has ended")
        if report is not None:
            failure_store.acknowledge()
            raise report.error(FailedOperation("init_process_group", name, rank))
        check_formation()

    try:
        return _interruptible(connect, check_others, name)
    except PhalanxError:
        raise
    except RuntimeError as error:
        check_others()  # an interrupted rank closes its connections after its report
        raise _unreachable(error, group) from None
    except (KeyboardInterrupt, SystemExit) as error:
        notify_others(type(error).__name__)
        if not error.args:
            where = FailedOperation("init_process_group", name, rank)
            others = name_ranks([r for r in range(size) if r != rank])
            error.args = (f"{where}: interrupted ({type(error).__name__}) while connecting to {others}.",)
        raise


def _interruptible(connect: Callable[[], GlooEngine], check_others: Callable[[], None], name: str) -> GlooEngine:
    """Run `connect` in a thread of its own, because Gloo connects in C++, where Python handles no signals.

    The calling thread runs `check_others` meanwhile. If `check_others` or a signal handler raises, the thread of
    `connect` is abandoned: it ends at Gloo's timeout, or with the process.
    """

    def close_late(late: Future[GlooEngine]) -> None:
        if late.exception() is None:
            late.result().close()
            late.result().free()

    engine = call_in_thread(connect, f"phalanx-{name}-connect")
    try:
        while not wait([engine], CHECK_S).done:
            check_others()
    except BaseException:
        engine.add_done_callback(close_late)
        raise
    return engine.result()


def _unreachable(error: RuntimeError, group: RendezvousGroup) -> PhalanxError:
    """Return the error of a rank that could not connect with all others; its message lists the addresses."""
    infos = group.infos
    hosts = "\n".join(
        f"  {name_ranks(list(host))}: {infos[host[0]].hostname} at {infos[host[0]].address or 'an unknown address'}"
        for host in group.layout.topology.hosts
    )
    return PhalanxError(
        f"init_process_group of group {group.name!r} on rank {group.rank}: the ranks' hosts cannot all reach each "
        f"other.\n{hosts}\nThe first failed connection: {error}\n"
        "Check that these addresses can be reached from each host (firewall, loopback address); choose another with "
        "pg_options=phalanx.Options(interface=...)."
    )


# Start MPI on all ranks of a group or on none: ranks with MPI would wait in MPI_Init for a rank without it.

_PAUSE_S = 0.002


def start_mpi_together(
    store: Any, rank: int, world_size: int, group: str, deadline: Deadline
) -> tuple[Runtime, list[int]]:
    """Start MPI on all ranks; return this process's MPI, and each rank's rank in MPI_COMM_WORLD.

    Only this group uses `store`.

    Raises:
        PhalanxError: some rank has no MPI, or the ranks are in several MPI jobs; all ranks raise the same error.
        DeadlineError: some rank did not join.
    """
    from phalanx._comm.engines.mpi import start, why_not

    here = f"init_process_group of group {group!r} on rank {rank}"
    problems = _gather_text(store, here, "mpi", rank, world_size, why_not(launcher()), deadline)
    _refuse_without_mpi(here, problems)
    mine: dict[str, Any]
    try:
        runtime = start(launcher())
        mine = {"place": runtime.rank, "problem": ""}
    except PhalanxError as error:
        mine = {"place": -1, "problem": str(error)}
    gathered = [
        json.loads(text) for text in _gather_text(store, here, "place", rank, world_size, json.dumps(mine), deadline)
    ]
    _refuse_without_mpi(here, [one["problem"] for one in gathered])
    places = [one["place"] for one in gathered]
    if len(set(places)) < world_size:
        raise PhalanxError(
            f"{here}: the ranks have the MPI ranks {places}, so they are in different MPI jobs.\n"
            "Start all ranks with one mpiexec."
        )
    return runtime, places


def _refuse_without_mpi(here: str, problems: list[str]) -> None:
    """Raise the most frequent problem, if any, with the ranks that report it."""
    by_text: dict[str, list[int]] = {}
    for r, problem in enumerate(problems):
        if problem:
            by_text.setdefault(problem, []).append(r)
    if by_text:
        text, who = max(by_text.items(), key=lambda item: len(item[1]))
        raise PhalanxError(f"{here}: MPI is not available on {name_ranks(who)} of {len(problems)}.\n{text}")


def _gather_text(
    store: Any, here: str, what: str, rank: int, world_size: int, words: str, deadline: Deadline
) -> list[str]:
    """Publish this rank's text, and return the texts of all ranks, by rank."""
    keys = [f"{what}/{r}" for r in range(world_size)]
    store.set(keys[rank], words)
    if not deadline.wait_until(lambda: store.check(keys), _PAUSE_S):
        missing = tuple(r for r in range(world_size) if not store.check([keys[r]]))
        raise DeadlineError(
            f"{here}: {name_ranks(missing)} of {world_size} did not join within {deadline.timeout_s:.1f} s.\n"
            "Read the log of the missing rank first.",
            missing=missing,
        )
    return [store.get(key).decode() for key in keys]
