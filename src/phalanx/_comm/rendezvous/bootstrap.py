"""Let the ranks of a new group find each other through the job's store, before they share anything else.

    every rank   add  <n>/came         → the number i of its arrival
                 set  <n>/rank/<i>     = its rank, its world size, its process and host   (one request at a coordinator)
    the first    get  <n>/rank/*       → set  <n>/ranks = all ranks, or the reason why there is no group
    every rank   get  <n>/ranks        → the ranks of one host connect to the socket of that host's first rank

Keys are numbered by arrival, not by rank: if two processes have the same rank, or different world sizes, both keys
exist, and both processes get an error. With one key per rank, one process would overwrite the other's key.

A start is one attempt to form a group at this store; `n` is its number. When a start has ended, or a FileStore has one
of processes that are dead, the next rank that arrives begins a new start. The key `bootstrap` holds the number of the
current start, and how the last one ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.control.wire import WRITE_ONCE
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.rendezvous.rank_info import (
    FormationFailure,
    RankArrival,
    RankInfo,
    find_dead,
    find_problem,
    host_identity,
    pack_infos,
    unpack_infos,
)
from phalanx._comm.rendezvous.torch_store import Store, address_of, base_of, file_of
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.errors import CoordinationError, DeadlineError, MismatchError, PeerLostError, PhalanxError

_logger = get_logger(__name__)
_LONGEST_PAUSE_S = 0.02
_CHECKS_PER_S = 256  # processes checked per second by all ranks together, while the first rank decides
_LONGEST_UNCHECKED_S = 30.0
_LONGEST_WAIT_S = 5.0
_MOST_DESCRIBED = 64  # in larger groups only the first arrival names the missing ranks
_CHECK_PROCESSES_S = 0.25  # how often a rank checks whether other processes have ended
_ACKNOWLEDGE_S = 1.0
_PATIENCE_S = 2.0  # how much later than the first arrival the other ranks report the missing ranks
_MOST_REMEMBERED = 64
NOTICE_S = 5.0

# Called repeatedly while ranks wait for each other; if the check raises, the wait ends.
_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextlib.contextmanager
def checked_while_forming(check: Callable[[], None]) -> Iterator[None]:
    """In this context, call `check` repeatedly while a group forms; an exception from `check` ends the wait."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_formation() -> None:
    """Call the check that `checked_while_forming` has set. Every wait while a group forms calls this repeatedly."""
    if (check := _check.get()) is not None:
        check()


class _Superseded(Exception):
    """Another start has replaced the start in which this rank waits."""


class Bootstrap:
    """A `Bootstrap` is one rank's part in one start of a group. `join` is collective over the group's ranks."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        mine: RankInfo,
        group: str,
        deadline: Deadline,
        *,
        is_further: bool = False,
    ) -> None:
        self._store = store
        self._arrivals = Arrivals(store, RankArrival(rank, world_size, mine))
        self._group = group
        self._is_further = is_further
        self._deadline = deadline
        self._num_checked = 0  # the number of arrivals that `_decide` has already checked
        self.infos: list[RankInfo] = []

    def join(self) -> list[RankInfo]:
        """Return every rank's information, by rank; the list is the same on every rank.

        Raises:
            ValueError: this rank does not exist in a group of this size.
            MismatchError: the ranks have different world sizes or versions of Phalanx, or two have the same rank.
            PeerLostError: a rank arrived, and its process then ended.
            DeadlineError: some ranks did not arrive in time, or the first one hangs; `missing` lists them.
        """
        outcome = None
        while outcome is None:
            self._arrivals.arrive()
            self._num_checked = 0
            with contextlib.suppress(_Superseded):
                outcome = self._wait()
        if failure := outcome.get("failure"):
            # After a mismatch, late ranks must read the error, too; missing ranks will not come.
            self.acknowledge_failure(expected=self._me.world_size - 1 if failure["kind"] == "mismatch" else 0)
            raise self._error(FormationFailure(failure["kind"], failure["text"], failure["ranks"]))
        self.infos = unpack_infos(outcome["ranks"])
        return self.infos

    def report_duplicate_rank(self) -> str:
        """Report this rejected rank to the ranks that wait; return the error that they raise, or "" if none waits."""
        arrivals = self._arrivals
        _, arrivals.number, _ = arrivals.current()
        infos = arrivals.key(OUTCOME)
        if self._store.check([infos]) or (arrivals.number and not arrivals.read_all()):
            return ""  # no start is in progress
        arrivals.me = replace(arrivals.me, is_contested=True)
        arrivals.register()

        def is_over() -> bool:
            if min(arrivals.read_all()) == arrivals.index:
                self._decide()
            return self._store.check([infos])

        if not self._poll_until(is_over, self._deadline, _no_notice):
            return ""
        failure = json.loads(self._store.get(infos)).get("failure")
        return str(failure["text"]) if failure else ""

    def acknowledge_failure(self, *, expected: int = 0) -> None:
        """Confirm that this rank has read the failure of this start; on rank 0, wait for the others' confirmations.

        Rank 0's process may serve the store; if it exited first, the others could only report that the store is gone.
        Rank 0 waits for at most one second, including the time for `expected` other ranks to arrive.
        """
        with contextlib.suppress(RuntimeError):  # the store is already gone
            if self._me.rank == 0:
                self._poll_until(lambda: self._all_acknowledged(expected), Deadline.after(_ACKNOWLEDGE_S), _no_notice)
            else:
                self._store.set(self._arrivals.key(f"acknowledged/{self._arrivals.index}"), "")

    def _all_acknowledged(self, expected: int) -> bool:
        others = [i for i, one in self._arrivals.read_all().items() if one.rank != 0]
        return len(others) >= expected and (
            not others or self._store.check([self._arrivals.key(f"acknowledged/{i}") for i in others])
        )

    def forget(self) -> None:
        """Delete the keys once all ranks have joined, so that a later group can use the same name. Rank 0 calls this.

        Call this before the first barrier: a rank that has passed the barrier may start the next group.
        """
        members = [[r, {**info.to_json(), "secret": ""}] for r, info in enumerate(self.infos)]
        how = f"a group of this name was formed here at {time.strftime('%H:%M:%S')}"
        self._arrivals.end(how, members if len(members) <= _MOST_REMEMBERED else [])
        self._arrivals.delete()

    @property
    def _me(self) -> RankArrival:
        return self._arrivals.me

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self) -> dict[str, Any]:
        """Return the outcome of this start: every rank's information, or the reason why there is no group."""
        is_first, clock = self._arrivals.index == 0, self._deadline.clock
        patience = self._deadline if is_first else Deadline.after(min(self._deadline.left_s + _PATIENCE_S, 1e9), clock)
        # Frequent polls by hundreds of ranks would delay the store's answers to the first arrival.
        check_s = min(max(_CHECK_PROCESSES_S, self._me.world_size / _CHECKS_PER_S), _LONGEST_UNCHECKED_S)
        next_check = Deadline.after(check_s, clock)

        def is_over() -> bool:
            nonlocal next_check, is_first
            if outcome.is_set():
                return True
            if is_first:
                outcome.stop_waiting()  # this rank publishes the outcome itself
                if self._decide():
                    return True
            if next_check.passed:
                next_check = Deadline.after(_CHECK_PROCESSES_S if is_first else check_s, clock)
                is_first = self._check_processes(is_first)
            return False

        def pause(pause_s: float) -> None:
            if is_first:  # the first arrival checks four times a second whether the arrivals fit together
                last.wait(min(_CHECK_PROCESSES_S, patience.left_s), pause_s)
            else:
                outcome.wait(min(check_s, _LONGEST_WAIT_S, patience.left_s), pause_s)

        def warn() -> None:
            _logger.warning(self._describe_wait(patience, is_first))

        last_key = self._arrivals.key(f"rank/{self._me.world_size - 1}")  # keys are numbered by arrival
        with (
            AwaitedKey(self._store, self._arrivals.key(OUTCOME), notified=not is_first) as outcome,
            AwaitedKey(self._store, last_key, notified=is_first) as last,
        ):
            if not self._poll_until(is_over, patience, warn, pause):
                self._give_up()
            found: dict[str, Any] = json.loads(outcome.get())
            return found

    def _decide(self) -> bool:
        """If the group is complete or impossible, publish that and return True. The first arrival calls this."""
        arrivals = list(self._arrivals.read_all().values())
        if len(arrivals) == self._num_checked:  # an arrival's record never changes
            return False
        self._num_checked = len(arrivals)
        if failure := find_problem(arrivals):
            self._publish(failure)
        elif len(arrivals) == self._me.world_size:
            infos = [one.info for one in sorted(arrivals, key=lambda one: one.rank)]
            self._store.compare_set(self._arrivals.key(OUTCOME), "", json.dumps({"ranks": pack_infos(infos)}))
        else:
            return False
        return True

    def _check_processes(self, is_first: bool) -> bool:
        """Fail the start if an arrived process has ended; return whether this rank is the first arrival.

        This rank becomes the first if all earlier arrivals died before they published their records.
        """
        arrivals = self._arrivals
        if arrivals.is_superseded():
            raise _Superseded
        if is_first:
            arrived = list(arrivals.read_all().values())
        else:  # only the first arrival checks all ranks
            is_first = arrivals.find_first()
            arrived = [arrivals.first]
        if failure := find_dead(arrived, self._me.info) or self._find_holder(len(arrivals.known)):
            self._publish(failure)
        return is_first and min(arrivals.known) == arrivals.index

    def _find_holder(self, num_arrived: int) -> FormationFailure | None:
        """Return a failure if no other rank has arrived and a running process of the previous group has this rank."""
        members = {r: RankInfo.from_json(info) for r, info in self._arrivals.before.get("members", ())}
        mine = self._me.info
        waited_s = self._deadline.timeout_s - self._deadline.left_s
        if num_arrived > 1 or waited_s < NOTICE_S or any(info.process == mine.process for info in members.values()):
            return None
        holder = members.get(self._me.rank)
        if holder is None or holder.host != mine.host or not holder.process.is_running():
            return None
        return FormationFailure(
            "mismatch",
            f"no other rank has joined, and rank {self._me.rank} is already another process, {holder}, which still "
            f"runs; {self._arrivals.before['how']}.\n"
            "Give each process a RANK (rank=...) of its own, and each job an address (port, file) of its own.",
            {self._me.rank: str(holder)},
        )

    def _give_up(self) -> None:
        """Publish, because the time is up, which ranks are missing; if none is, that the first arrival hangs."""
        missing = self._arrivals.missing()
        if missing:
            size = self._me.world_size
            where = address_of(self._store)
            text = (
                f"{name_ranks(missing)} of {size} never joined{f' at {where}' if where else ''} within "
                f"{self._deadline.timeout_s:.1f} s.\n"
                f"{self._advice()}"
            )
            if where and not self._is_further:
                text += "\nAll ranks need this address and port (MASTER_ADDR, MASTER_PORT), and a network route to it."
            if self._arrivals.before:
                text += f"\nBefore this start, {self._arrivals.before['how'].rstrip('.')}."
            self._publish(FormationFailure("missing", text, dict.fromkeys(missing, "never joined")))
            return
        first = self._arrivals.first
        text = (
            f"all ranks have joined, but rank {first.rank} ({first.info}) did not publish the list of ranks within "
            f"{self._deadline.timeout_s:.1f} s: it hangs, or is stopped.\nLook at that process first."
        )
        self._publish(FormationFailure("missing", text, {first.rank: str(first.info)}))

    def _advice(self) -> str:
        if self._is_further:
            return (
                "These ranks already have a group. So the missing ranks have not created this group, or have created "
                "another group first.\nAll ranks must create all groups in the same order, including groups that they "
                "are not in. Look for a new_group that only some ranks call, and read the log of a missing rank."
            )
        return (
            f"Check that {self._me.world_size} processes were started and that each reached init_process_group; "
            "read the log of a missing rank first."
        )

    def _publish(self, failure: FormationFailure) -> None:
        """Publish why there is no group, unless another rank has published an outcome."""
        now = time.strftime("%H:%M:%S")
        data = {"kind": failure.kind, "text": failure.text, "ranks": dict(failure.ranks), "at": now}
        self._store.compare_set(self._arrivals.key(OUTCOME), "", json.dumps({"failure": data}))

    def _error(self, failure: FormationFailure) -> Exception:
        who = {int(r): what for r, what in failure.ranks.items()}
        here = f"init_process_group of group {self._group!r}"
        if failure.kind == "missing":
            return DeadlineError(f"{here}: {failure.text}", missing=tuple(who))
        here = f"{here} on rank {self._me.rank}"
        if failure.kind == "lost":
            return PeerLostError(f"{here}: {failure.text}", ranks=tuple(who))
        if not 0 <= self._me.rank < self._me.world_size:
            return ValueError(f"{here}: {failure.text}")
        return MismatchError(f"{here}: {failure.text}", calls=who)

    def _poll_until(
        self,
        is_over: Callable[[], bool],
        deadline: Deadline,
        notice: Callable[[], None],
        pause: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Poll until `is_over`, and call `notice` once after `NOTICE_S`; return False when the time is up.

        `Store.wait` cannot be used here: Ctrl-C does not interrupt it, FileStore rounds its timeout to whole seconds,
        and TCPStore prints a warning on every timeout. `pause` may return early, when the store notifies this process.
        """
        notice_at = Deadline.after(NOTICE_S, deadline.clock)
        has_notified, pause_s = False, 0.0005
        while True:
            if is_over():
                return True
            if deadline.passed:
                return False
            check_formation()
            if notice_at.passed and not has_notified:
                has_notified = True
                notice()
            pause(min(pause_s, deadline.left_s))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _describe_wait(self, patience: Deadline, is_first: bool) -> str:
        waited = patience.timeout_s - patience.left_s
        first, size = self._arrivals.first, self._me.world_size
        if size > _MOST_DESCRIBED and not is_first:  # thousands of ranks would read each other's records
            num_missing = size - self._arrivals.count()
            first_name = f"rank {first.rank}" if first is not self._me else "the rank that joined first"
            whom = f"{num_missing} of {size} ranks (the log of {first_name} names them)"
        else:
            missing = self._arrivals.missing()
            num_missing, whom = len(missing), name_ranks(missing)
        if num_missing <= 0:
            whom = f"rank {first.rank} to publish the list of ranks"
        before = f" Before this start, {self._arrivals.before['how']}." if self._arrivals.before else ""
        return (
            f"init_process_group of group {self._group!r}: waiting for {whom} for {waited:.0f} s; "
            f"giving up after {self._deadline.timeout_s:.0f} s.{before}"
        )


def exchange(
    store: Store,
    rank: int,
    world_size: int,
    mine: RankInfo,
    group: str,
    deadline: Deadline,
    *,
    is_further: bool = False,
) -> Bootstrap:
    """Exchange the information of all ranks, and return the completed `Bootstrap`.

    `is_further`: this process already has a group, so errors give advice about groups, not about processes.

    Raises:
        ValueError, MismatchError, PeerLostError, DeadlineError: see `Bootstrap.join`.
        PeerLostError: the process that served the store has ended.
    """
    bootstrap = Bootstrap(store, rank, world_size, mine, group, deadline, is_further=is_further)
    try:
        bootstrap.join()
    except PhalanxError:
        raise
    except RuntimeError as error:  # DistNetworkError: the process that serves the store has ended
        raise PeerLostError(
            f"init_process_group of group {group!r} on rank {rank}: the process that served the job's store has ended: "
            f"rank 0, or the launcher.\ntorch said: {str(error).splitlines()[0]}\nRead its log first.",
            ranks=() if rank == 0 else (0,),
        ) from None
    return bootstrap


def report_duplicate_rank(store: Store, rank: int, world_size: int) -> str:
    """Report to the ranks that wait at `store` that this process also claims `rank` and was rejected.

    Return the error that they raise, or "" if no rank waits. This takes at most two seconds.
    """
    info = RankInfo(host_identity(), os.uname().nodename, "", ProcessId.of_self(), frozenset(), 0)
    bootstrap = Bootstrap(store, rank, world_size, info, "0", Deadline.after(_PATIENCE_S))
    return bootstrap.report_duplicate_rank()


def _no_notice() -> None:
    pass


class AwaitedKey:
    """An `AwaitedKey` waits for the value of `key` in `store`. As a context manager it stops waiting on exit.

    Arguments:
        notified: whether the store notifies this process. If False, or if the store cannot, every check polls it.

    Cost: at the job's coordinator one request in all, however long the wait; at other stores one request per check.

    Raises:
        RuntimeError: from any method, as torch's stores do: the process that serves the store has ended.
    """

    def __init__(self, store: Store, key: str, *, notified: bool = True) -> None:
        self._store = store
        self._key = key
        self._value: bytes | None = None
        self._pending: Any = None  # the request that waits at the store, if there is one
        base = base_of(store)
        if notified and hasattr(base, "begin_get"):
            with _in_torchs_words():
                self._pending = base.begin_get(base.name_through(store, key))

    def is_set(self) -> bool:
        """Return whether the value is set, without waiting."""
        if self._pending is None:
            return self._value is not None or self._store.check([self._key])
        with _in_torchs_words():
            self._set(self._pending.poll())
        return self._value is not None

    def wait(self, wait_s: float, pause_s: float) -> None:
        """Wait for the value, at most `wait_s`; if the store does not notify, sleep for `pause_s`."""
        if self._pending is None:
            time.sleep(pause_s)
        else:
            with _in_torchs_words():
                self._set(self._pending.wait(wait_s))

    def get(self) -> bytes:
        """Return the value, which must be set."""
        return self._store.get(self._key) if self._value is None else self._value

    def _set(self, value: bytes | None) -> None:
        if value is not None:
            self._value = value
            self.stop_waiting()

    def stop_waiting(self) -> None:
        """Cancel the notification: from now on every check polls the store."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()

    def __enter__(self) -> AwaitedKey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(RuntimeError):
            self.stop_waiting()


@contextlib.contextmanager
def _in_torchs_words() -> Iterator[None]:
    try:
        yield
    except CoordinationError as error:
        raise RuntimeError(str(error)) from error


# The keys of start `n` begin with `n`; `bootstrap` holds the number of the current start, and how the last one ended.

# The key of every rank's information, or of the failure; a host's relay fetches it once for all ranks of the host.
OUTCOME = f"ranks{WRITE_ONCE}"


class Arrivals:
    """`Arrivals` are the ranks that have arrived in the current start at `store`; `me` is this rank.

    A rank's place is the number of its arrival. `known` has the arrivals read so far, by place; a record never changes.
    """

    def __init__(self, store: Store, me: RankArrival) -> None:
        self._store = store
        self.me = me
        self.number = 0  # the number of the start
        self.index = 0  # the place of `me`
        self.before: dict[str, Any] = {}  # how the last start ended, and with which members
        self.known: dict[int, RankArrival] = {}
        self._num_searched = 1  # the number of places in which this rank searches for the first arrival
        self._in_file = file_of(store)

    def key(self, name: str) -> str:
        """Return the store's key for `name` of this start."""
        return f"{self.number}/{name}"

    @property
    def first(self) -> RankArrival:
        """Return the earliest arrival known."""
        return self.known[min(self.known)]

    def current(self) -> tuple[str, int, dict[str, Any]]:
        """Return the value of the key `bootstrap`, the number of the start in it, and how the last start ended."""
        text = self._store.compare_set("bootstrap", "", "").decode()  # the value, or "", in one request
        return text, *_read_state(text)

    def end(self, how: str, members: Sequence[Any] = ()) -> None:
        """End this start: the next rank that arrives begins a new one."""
        text, number, _ = self.current()
        if number == self.number:
            before = {"how": how, "members": list(members)}
            self._store.compare_set("bootstrap", text, json.dumps({"number": number + 1, "before": before}))

    def is_superseded(self) -> bool:
        """Return whether a newer start has replaced this one before it had an outcome."""
        return self.current()[1] != self.number and not self._store.check([self.key(OUTCOME)])

    def delete(self) -> None:
        """Delete the keys of this start, as far as the store supports it."""
        base = base_of(self._store)
        if hasattr(base, "delete_prefix"):
            base.delete_prefix(base.name_through(self._store, self.key("")))
            return
        for key in [*(f"rank/{i}" for i in list(self.read_all())), "came", OUTCOME]:
            with contextlib.suppress(Exception):  # a store that cannot delete keeps a few bytes
                self._store.delete_key(self.key(key))

    # -- arriving ------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Register this rank in the current start, or in a new one."""
        while True:
            has_outcome = self._find_start()
            self.known = {}
            if how := self._describe_leftover(has_outcome):
                self.end(how)
                continue
            self.register()
            self.known[self.index] = self.me
            if self.current()[1] == self.number:
                return

    def _find_start(self) -> bool:
        """Find the current start, and return whether it has an outcome.

        Cost: one round trip if the store supports it and the start is the expected one; otherwise two.
        """
        base, expected = base_of(self._store), self.number
        if not hasattr(base, "read_and_check"):
            _, self.number, self.before = self.current()
            return self._store.check([self.key(OUTCOME)])
        names = (base.name_through(self._store, name) for name in ("bootstrap", self.key(OUTCOME)))
        text, has_outcome = base.read_and_check(*names)
        self.number, self.before = _read_state(text.decode())
        return has_outcome if self.number == expected else self._store.check([self.key(OUTCOME)])

    def register(self) -> None:
        """Register this rank in the next place, and publish its record, in one request where the store supports it."""
        words = json.dumps(self.me.to_json())
        base = base_of(self._store)
        if hasattr(base, "add_item"):
            counter, prefix = (base.name_through(self._store, self.key(name)) for name in ("came", "rank/"))
            self.index = int(base.add_item(counter, prefix, words))
            return
        self.index = self._store.add(self.key("came"), 1) - 1
        self._store.set(self.key(f"rank/{self.index}"), words)

    def _describe_leftover(self, has_outcome: bool) -> str:
        """Return how this start ended, if it has ended and does not concern a rank that arrives now; else ""."""
        if has_outcome:
            failure = json.loads(self._store.get(self.key(OUTCOME))).get("failure")
            if failure is None:
                return ""
            # A late rank of the same job must read why the start failed. A file does not show which job wrote it: if
            # one of its processes still runs, it was this job. A process that has read the failure tries again.
            processes = [one.info.process for one in self.read_all().values()]
            has_read = self.me.info.process in processes
            is_old = bool(self._in_file) and not any(process.is_running() for process in processes)
            if not (has_read or is_old):
                return ""
            return f"an earlier start ended at {failure['at']}: {failure['text'].splitlines()[0]}"
        if self._in_file and (dead := find_dead(list(self.read_all().values()), self.me.info)):
            # A file outlives its job: these processes ended in an earlier job, and will never answer.
            who = ", ".join(f"rank {r} ({info})" for r, info in dead.ranks.items())
            return f"an earlier start left data in {self._in_file}, but {who} has ended"
        return ""

    # -- arrivals ------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of arrivals; a host's relay combines the requests of its ranks."""
        came = self.key("came")
        return int(self._store.compare_set(came, "", "") or 0) if self._store.check([came]) else 0

    def read_all(self) -> dict[int, RankArrival]:
        """Return all arrivals that have written their records, by place."""
        self._read([i for i in range(self.count()) if i not in self.known])
        return self.known

    def missing(self) -> list[int]:
        came = {one.rank for one in self.read_all().values()}
        return [r for r in range(self.me.world_size) if r not in came]

    def find_first(self) -> bool:
        """Search for the first arrival, in twice as many places at each call; return whether it is `me`.

        `me` is the first if no earlier place has a record, because those processes may have died. Later records are not
        read, because thousands of ranks would read each other's records.
        """
        num_searched = min(self._num_searched, min(self.known))
        self._read(list(range(num_searched)))
        if min(self.known) != self.index:
            return False
        self._num_searched *= 2
        return self.index == num_searched

    def _read(self, places: list[int]) -> None:
        """Read the records at `places` together, or in halves if a process has not written its record yet."""
        keys = [self.key(f"rank/{i}") for i in places]
        if keys and self._store.check(keys):
            for i, text in zip(places, self._store.multi_get(keys), strict=True):
                self.known[i] = RankArrival.from_json(json.loads(text))
        elif len(places) > 1:
            middle = len(places) // 2
            self._read(places[:middle])
            self._read(places[middle:])


def _read_state(text: str) -> tuple[int, dict[str, Any]]:
    """Parse the value of `bootstrap`: the number of the start, and how the last start ended."""
    data: dict[str, Any] = json.loads(text) if text else {"number": 0, "before": {}}
    return data["number"], data["before"]
