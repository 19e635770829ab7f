"""`PhalanxProcessGroup` implements c10d's process group: its calls, their order, its members and its end."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from phalanx._base.deadline import Deadline
from phalanx._base.torch_names import find
from phalanx._comm.backend import splitting
from phalanx._comm.backend.arguments import ArgumentError, timeout_of
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.memoryless import FakeCall, work_of_fake_call
from phalanx._comm.backend.overloads import plain_form, resolve
from phalanx._comm.backend.process_group import collectives, messages
from phalanx._comm.backend.process_group.messages import GroupMessages
from phalanx._comm.backend.process_group.observed import (
    early_modes,
    is_recorded,
    num_modes,
    profiler,
    record,
    transform,
)
from phalanx._comm.backend.splitting import Splits
from phalanx._comm.backend.torch_integration.groups import TorchGroup
from phalanx._comm.backend.torch_integration.hooks import hookable
from phalanx._comm.backend.work import CompletedWork, PhalanxWork, RecentWorks, SerialExecutor
from phalanx._comm.diagnostics.call_sites import calling_site
from phalanx._comm.diagnostics.failure_report import closed, nested
from phalanx._comm.symmetric_memory.scratch import Scratch, open_scratch
from phalanx._comm.transport.base import CallContext, Transport
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.backend.reconfiguration import Reconfiguration
    from phalanx._comm.symmetric_memory.memory import SymmetricMemory
    from phalanx._comm.transport.shared_memory import SharedMemoryTransport


_backend: Any = find("torch._C._distributed_c10d.Backend", loses="a group lacks a backend's Options", instead=None)
_ErrorType: Any = find("torch._C._distributed_c10d.ErrorType", loses="get_error() of a group does not work")
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"Backend {self.getBackendName()} does not support {what}")

    return refuse


class Members(NamedTuple):
    """`Members` is this process's rank in a group, the number of ranks, and each rank's rank in the job."""

    rank: int
    size: int
    global_ranks: tuple[int, ...]


Operation = Callable[[CallContext], None]
Result = TypeVar("Result")

_JOIN_S = 5.0


def _entry_point(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective or message of a group so that it accepts all of PyTorch's overloads.

    The method itself receives the form in which torch's functions call it: positional arguments, the options last. It
    may raise `FakeCall`, for which a completed work is returned. PyTorch's tools observe the call. `allreduce` does all
    this itself, because another Python frame would cost too much there.
    """
    name = method.__name__
    count, last = plain_form(name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != count or type(args[-1]) is not last:
            args = resolve(name, args, kwargs)
        if (
            num_modes() or early_modes[0] is not None or transform() is not None or profiler._is_profiler_enabled
        ) and not is_recorded():
            return record(self, name, args)
        try:
            return method(self, *args)
        except FakeCall:
            return work_of_fake_call(name, args)
        except ArgumentError:
            resolve(name, args, {})  # raises TypeError if the call matches no overload
            raise

    del call.__wrapped__  # code that unwraps decorators, such as `untraced`, must find this function
    return call


@untraced
@hookable
class PhalanxProcessGroup(TorchGroup):
    """A `PhalanxProcessGroup` is the backend "phalanx", which `init_process_group("phalanx")` creates.

    It has torch's process group interface, and runs the group's operations in order. Asynchronous calls run on the
    group's executor, a single thread with a FIFO queue. A synchronous call runs in the caller's thread, unless calls
    are queued. Either way all ranks run the same calls in the same order. The transport makes operations in the
    main thread interruptible by Ctrl-C; a wait for the executor always is.
    """

    # The interface of torch's `Backend`. The group refuses what Gloo refuses, with torch's error and text.
    Options: Any = getattr(_backend, "Options", None)
    supports_splitting = splitting.TORCH_SPLITS_ON_CPU
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False
    use_pg_for_symm_mem_rendezvous = False

    shrink = _refuse("shrink")
    suspend = _refuse("suspend")
    resume = _refuse("resume")
    memory_stats = _refuse("getMemoryStats")
    mem_allocator = property(_refuse("getMemAllocator"))
    new_window = _refuse("new_window")  # torch's own method ends the process
    _start_time_estimate = _end_time_estimate = _refuse("time estimation")
    _register_on_completion_hook = _refuse("onCompletion hooks")
    _wait_for_pending_works = _refuse("waitForPendingWorks")

    def __init__(
        self,
        store: Store,
        transport: Transport,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] = (),
    ) -> None:
        # With (store, rank, size), the stub's only signature, torch would look for its own backends.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self.timeout_s = timeout.total_seconds()
        self._name = name
        self._desc = ""
        self.number = next(_numbers)
        """The group's number among this process's groups, in the order of creation."""
        self._closing = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        self.done_work = CompletedWork()
        self.backend_options: Any = None
        """The `phalanx.Options` with which the group was created, or None."""
        self.reconfiguration: Reconfiguration | None = None
        """The object that replaces the group's members, if the group was created with `enable_reconfigure`."""
        self.create_group: Callable[[Any, Any], Any] | None = None
        """`create_process_group`, which creates the groups that are split from this one."""
        self._connect(transport, rank, size, global_ranks)
        self.register_with_torch(self._device_types)
        _open_groups.add(self)

    def _connect(self, transport: Transport, rank: int, size: int, global_ranks: Sequence[int] = ()) -> None:
        """Connect the group to the members that `transport` reaches; no operation may be running."""
        self.transport = transport
        self.shared_memory = cast("SharedMemoryTransport", transport) if transport.ranks_share_memory else None
        self.members = Members(rank, size, tuple(global_ranks) or tuple(range(size)))
        self._interrupted = None if transport.is_interruptible else transport.interrupted
        self.executor = SerialExecutor(
            f"phalanx-{self._name}",
            callbacks_first=True,
            interrupted=self._interrupted,
            counter=None if self.shared_memory is None else self.shared_memory.core,
        )
        self.recent_works = RecentWorks()
        self.messages = GroupMessages(transport, self.shared_memory, self.members, self._interrupted, self.recent_works)
        self.closed = False
        self._splits = Splits()
        self._scratch: Scratch | None = None  # memory for `allocate_tensor`; None until its first call
        self.num_gradient_rounds = 0
        """The number of completed gradient rounds, which are not among the transport's collectives."""

    # -- the calls: each function receives the group, checks the arguments, and calls the transport's operation -----

    allreduce: Any = collectives.allreduce  # does the work of `_entry_point` itself
    allreduce_sparse = allreduce
    broadcast = _entry_point(collectives.broadcast)
    reduce = _entry_point(collectives.reduce)
    allgather = _entry_point(collectives.allgather)
    all_gather_single = _allgather_base = _entry_point(collectives.all_gather_single)
    gather = _entry_point(collectives.gather)
    scatter = _entry_point(collectives.scatter)
    reduce_scatter = _entry_point(collectives.reduce_scatter)
    reduce_scatter_single = _reduce_scatter_base = _entry_point(collectives.reduce_scatter_single)
    alltoall = _entry_point(collectives.alltoall)
    all_to_all_single = alltoall_base = _entry_point(collectives.all_to_all_single)
    barrier = _entry_point(collectives.barrier)
    allreduce_coalesced = _entry_point(collectives.allreduce_coalesced)
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _entry_point(
        collectives.all_gather_single_coalesced
    )
    allgather_coalesced = _entry_point(collectives.allgather_coalesced)
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _entry_point(
        collectives.reduce_scatter_single_coalesced
    )
    send = _entry_point(messages.send)
    recv = _entry_point(messages.recv)
    recv_anysource = _entry_point(messages.recv_anysource)
    gather_single = gather_into_tensor = collectives.gather_single
    monitored_barrier = collectives.monitored_barrier
    broadcast_buffers = collectives.broadcast_buffers
    sparse_mean = collectives.sparse_mean

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations in the block run as they are called."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return a Work that completes when all operations of the block have completed."""
        return self.carry_out(lambda ctx: None, None, [])

    # -- other members -------------------------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether the group was created with `enable_reconfigure`."""
        return self.reconfiguration is not None

    def _require_reconfiguration(self) -> Reconfiguration:
        if self.reconfiguration is None:
            raise PhalanxError(
                f"group {self._name!r} cannot change its members: it was created without enable_reconfigure.\n"
                "Create it with init_process_group('phalanx', enable_reconfigure=True)."
            )
        return self.reconfiguration

    def get_reconfigure_handle(self) -> str:
        """Return this process's handle for `torch.distributed._reconfigure`."""
        return self._require_reconfiguration().handle(self)

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the group's members by those with `opts.handles`; return when they are connected."""
        self._require_reconfiguration().apply(self, opts)
        return self.done_work

    def reconnect(
        self,
        connect: Callable[[], Transport],
        instead: Transport,
        store: Store,
        rank: int,
        size: int,
        global_ranks: Sequence[int] = (),
    ) -> None:
        """Leave the group's members, and use the transport that `connect` returns; if it raises, keep `instead`."""
        if not self.transport.closed:
            self.leave_members(_JOIN_S)
        self._connect(instead, self.members.rank, self.members.size, self.members.global_ranks)
        transport = connect()
        self._store = store
        self._connect(transport, rank, size, global_ranks)

    # -- groups of some of the members ---------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Return the group of `new_ranks`; None if this rank is not one of them. All members call this.

        The new group supports the same devices as this one; `device_types` is ignored.
        """
        if self.closed:
            raise closed(self._name)
        return self._splits.split(self, new_ranks, timeout, opts, group_name, group_desc)

    # -- identity ------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of our backend in torch."""
        return "phalanx"

    _get_backend_name = getBackendName
    name = getBackendName

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.members.rank

    def size(self) -> int:
        """Return the number of processes in the group."""
        return self.members.size

    getRank = rank
    getSize = size

    @property
    def symm_mem(self) -> SymmetricMemory:
        """Return the memory that all ranks share."""
        assert self.shared_memory is not None, f"the ranks of group {self._name!r} share no memory"
        return self.shared_memory.symm_mem

    @property
    def shares_memory(self) -> bool:
        """Return whether all ranks share memory, because they are on one host."""
        return self.shared_memory is not None

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a separate type for mypy; a string
        """Return the name that torch gave the group; it is unique in the job."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return the description that the group's creator gave it."""
        return self._desc

    def getGroupName(self) -> str:
        """Return `group_name`, for torch's C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return `group_desc`, for torch's C++."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.transport.group = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"group {self._name!r}: backend {self.getBackendName()!r} has no backend for device {device}"
            )
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` returns memory that saves collectives a copy; FSDP2 calls this."""
        return torch.device(device).type == "cpu" and self.shared_memory is not None and self.members.size > 1

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of `size` elements that other ranks can read in place; if no room is left, an ordinary one.

        A group's first call is collective. Large tensors of this kind are gathered with one copy instead of two.

        Shape: (size,).

        Raises:
            RuntimeError: the ranks share no memory, the group has one rank, or `device` is not the CPU.
            MismatchError, PeerLostError, DeadlineError, ClosedError: in the first call, as for collectives.
        """
        if not self.supports_tensor_alloc(device):
            raise RuntimeError(f"group {self._name!r} cannot allocate tensors on {device}")
        if self._scratch is None:
            heap_bytes, site = self.symm_mem.heap_bytes, calling_site()
            self._scratch = open_scratch(heap_bytes, lambda n: self.allocate_symmetric((n,), torch.uint8, site))
        return self._scratch.allocate(size, dtype)

    def allocate_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[str, int], *, owner: int | None = None
    ) -> torch.Tensor:
        """Allocate the tensor of `shared_empty`; `place` is the user's call site. All ranks call it.

        Shape: `shape`, the same on every rank.

        Raises:
            MismatchError, PeerLostError, DeadlineError, ClosedError: as for collectives.
            PhalanxError: the heap has no room for it.
        """
        assert self.shared_memory is not None
        memory, ctx = self.shared_memory, CallContext(self.timeout_s, self.transport.call_site(place))
        return self.in_order(lambda: memory.allocate(shape, dtype, ctx, owner=owner))

    def allocate_on_host(self, nbytes: int, place: tuple[str, int]) -> dict[int, torch.Tensor]:
        """Allocate memory for each rank of this host; `place` is the user's call site. All ranks call it.

        Shape: (nbytes,) each.

        Raises:
            MismatchError, PeerLostError, DeadlineError, ClosedError: as for collectives.
        """
        transport, ctx = self.transport, CallContext(self.timeout_s, self.transport.call_site(place))
        return self.in_order(lambda: transport.allocate_on_host(nbytes, ctx))

    @property
    def options(self) -> Any:
        """Return the timeout and ranks of the group, under the names that torch's backends use."""
        return GroupOptions(
            timedelta(seconds=self.timeout_s), list(self.members.global_ranks), self._name, self.getBackendName()
        )

    def get_group_store(self) -> Store:
        """Return the store under the group's prefix."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self.closed else self.transport.seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the sequence number is counted in shared memory from the start."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations from now on."""
        self.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- order ---------------------------------------------------------------------------------------------------

    def call_context(self, options: Any) -> CallContext:
        if self.closed or self.transport.closed:  # in a forked child only the transport is closed
            raise closed(self._name)
        return CallContext(timeout_of(options, self.timeout_s), self.transport.call_site(calling_site()))

    def is_free(self) -> bool:
        """Return whether a synchronous call can run at once."""
        executor = self.executor  # inlines `executor.idle`
        return (
            not (executor.busy or executor.items or executor.is_bypassed or executor.callers)
            and not self.closed
            and not self.transport.closed
        )

    def carry_out(self, operation: Operation, options: Any, outputs: Sequence[Any]) -> dist.Work:
        """Run `operation` now, or queue it, and return its work."""
        waits = not getattr(options, "asyncOp", True)
        ctx = self.call_context(options)
        ctx.awaited = waits
        self.refuse_nested()
        if waits and self.executor.idle:
            self.executor.run_here(partial(operation, ctx))
            return self.done_work
        work = self.enqueue(self.executor, partial(operation, ctx), outputs)
        if waits and self._interrupted is not None:
            work.wait()
        return work

    def refuse_nested(self, what: str = "a collective") -> None:
        """Raise a PhalanxError if this is a signal handler that interrupted an operation of this group."""
        if self.executor.is_nested():
            raise nested(f"{what} in group {self._name!r} on rank {self.members.rank}")

    def in_order(self, operation: Callable[[], Result]) -> Result:
        """Run `operation`, which calls the transport directly, after all earlier calls; return its result.

        This gives an operation that is not a c10d collective the same place in the order of calls on all ranks.
        """
        self.refuse_nested()
        if self.executor.idle:
            return self.executor.run_here(operation)
        results: list[Result] = []
        self.enqueue(self.executor, lambda: results.append(operation()), []).wait()
        return results[0]

    def precede(self, action: Callable[[Deadline], None]) -> None:
        """Call `action` in the first collective that is called from now on, as `Transport.precede` does."""
        if self.executor.idle:
            self.transport.precede(action)
        else:
            self.enqueue(self.executor, lambda: self.transport.precede(action), [])

    def drain(self) -> None:
        """Wait until all background collectives of this process have ended, successfully or not."""
        if not self.executor.idle:
            self.enqueue(self.executor, lambda: None, []).wait()

    def enqueue(self, executor: SerialExecutor, action: Callable[[], None], outputs: Sequence[Any]) -> PhalanxWork:
        work = PhalanxWork(outputs)
        self.recent_works.append(work)
        return executor.put(action, work)

    def find_failure(self) -> BaseException | None:
        """Return the latest error of a background operation, or None; torch's C++ may have converted the error."""
        return next((error for work in reversed(self.recent_works) if (error := work.exception()) is not None), None)

    # -- torch's interface of a backend --------------------------------------------------------------------------

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        """Set `use_pg_for_symm_mem_rendezvous`, which torch reads for GPU memory only."""
        self.use_pg_for_symm_mem_rendezvous = value

    def _set_group_uid(self, pg_uid: str) -> None:
        """Do nothing: torch needs the uid only for its own log."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing, like Gloo."""

    def get_error(self) -> Any:
        """Return torch's `ErrorType` for the failure of an operation that ran in the background."""
        error = self.find_failure()
        if error is None:
            return _ErrorType.SUCCESS
        if isinstance(error, DeadlineError):
            return _ErrorType.TIMEOUT
        return _ErrorType.REMOTE_ERROR if isinstance(error, PeerLostError) else _ErrorType.COMM_ERROR

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group take no part in its creation."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the members are connected from the start."""

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> Any:
        """Form a group of these ranks in `store`; return None if this rank is not one of them."""
        if self.rank() not in ranks:
            return None
        return splitting.form_group(self, store, list(ranks).index(self.rank()), len(ranks), opts._timeout)

    def merge(self, store: Store, opts: Any, rank: int, size: int) -> Any:
        """Form a group of `size` ranks, from this group and others, in `store`."""
        return splitting.form_group(self, store, rank, size, opts._timeout)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Form a group of `size` ranks, from this group and others, numbered in the order of arrival at `store`."""
        rank = store.add("mergeGroupRank", 1) - 1
        name, description = group_name or f"{self.group_name}:merge", group_desc or f"{self.group_desc}:merge"
        return splitting.form_group(self, store, rank, size, timeout, name=name, description=description)

    # -- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Complete the queued operations, then leave the group."""
        self._leave(_JOIN_S)

    def abort(self) -> None:
        """Leave the group at once; threads that wait in it receive an error."""
        self._leave(0.0)

    def leave_at_exit(self, exit_reason: str) -> None:
        """Leave the group if it is still open, and report to its members the reason for which this process ends."""
        if not self.closed and not self.transport.closed:
            self.transport.set_exit_reason(exit_reason)
            self._leave(0.1, for_good=True)

    def _leave(self, patience_s: float, *, for_good: bool = False) -> None:
        """Leave the group; with `for_good`, at the end of the process, abandon operations that outlast `patience_s`."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            _open_groups.discard(self)
        if not self.transport.closed:  # in a forked child, the threads and the group's rank belong to the parent
            self.leave_members(patience_s, for_good=for_good)

    def leave_members(self, patience_s: float, *, for_good: bool = False) -> None:
        """Leave the current members, after waiting up to `patience_s` for operations to complete."""
        ended = self._wait_for_operations(patience_s)
        if not ended and not self.transport.closed:
            if for_good and self.transport.closes_in_flight:
                self.transport.abandon()
                return
            self.transport.leave_in_flight()
            ended = self._wait_for_operations(_JOIN_S)
        self.recent_works.clear()
        self._scratch = None
        self.release_memory()
        if ended or self.transport.closes_in_flight:
            self.transport.close()

    def release_memory(self) -> None:
        """Release a subclass's references to the group's memory; no operation of the group may be running."""

    def _wait_for_operations(self, patience_s: float) -> bool:
        """Wait up to `patience_s` for queued and running operations; return whether all have completed."""
        deadline = Deadline.after(patience_s)
        ended = all([part.close(deadline.left_s) for part in (self.executor, self.messages)])
        return self.transport.settle(deadline.left_s) and ended


@dataclass
class GroupOptions:
    """`GroupOptions` are a group's timeout and ranks, under the names that torch's backends use."""

    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str
    backend: str


# The groups that this process has created and not left.

_open_groups: weakref.WeakSet[PhalanxProcessGroup] = weakref.WeakSet()
_numbers = itertools.count()


def open_groups() -> list[PhalanxProcessGroup]:
    """Return the groups that this process has not left, oldest first."""
    return sorted(_open_groups, key=lambda group: group.number)


def leave_all(exit_reason: str) -> None:
    """Leave every open group at the end of the process, and report `exit_reason` to the groups' members."""
    for group in open_groups():
        group.leave_at_exit(exit_reason)
