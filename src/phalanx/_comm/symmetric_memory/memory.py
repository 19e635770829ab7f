"""`SymmetricMemory` is the memory that the ranks of a host share: control memory for the C core, and a tensor heap."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import resource
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phalanx import _core
from phalanx._base.core_numbers import BYTES, MISMATCH
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._base.ipc.local_listener import LocalAddress
from phalanx._comm.symmetric_memory.fd_server import FdServer, Notice, receive_fds
from phalanx._comm.symmetric_memory.liveness_pipe import LivenessPipes, needs_liveness_pipes, new_pipes
from phalanx._comm.symmetric_memory.memfd import SparseFile, memory, sparse_memory
from phalanx._comm.symmetric_memory.watch import Pidfds, ProcessId
from phalanx.errors import ClosedError, InternalError, PhalanxError

# Two stages of this size per rank, chosen so that a chunk in transit fits in a second-level cache.
STAGE_BYTES = 128 * 1024
# Between hosts, at each sync a rank's background thread waits for a core that the backward pass uses, and links are too
# slow for a cache to matter. So the chunks are larger, and the syncs fewer.
STAGE_BYTES_BETWEEN_HOSTS = 1024 * 1024
SPIN_NS = 100_000  # how long a rank polls memory before it sleeps: a few times the cost of waking it up

# The address space for all ranks' heaps together, unless twice the machine's memory is more.
_HEAPS_BYTES = 1 << 42

Buffer: TypeAlias = "ctypes.Array[ctypes.c_char]"

_BLOCK = struct.Struct("=qQQq")
_NO_ROOM, _DISK_FULL = -1, -2  # returned instead of a block's index


@dataclass(frozen=True)
class LocalRank:
    """A `LocalRank` is a rank of this host: its process, the cores that it may use, and its number of threads."""

    process: ProcessId
    cpus: frozenset[int]
    threads: int = 1


def is_oversubscribed(members: Sequence[LocalRank]) -> bool:
    """Return whether the ranks have more threads than cores: then a waiting thread must sleep, not spin."""
    cores: frozenset[int] = frozenset().union(*(member.cpus for member in members))
    return sum(member.threads for member in members) > len(cores)


def _background_spin_ns(members: Sequence[LocalRank]) -> int:
    """Return how long a background thread spins before it sleeps: 0 if there are fewer than two cores per rank."""
    cores: frozenset[int] = frozenset().union(*(member.cpus for member in members))
    return SPIN_NS if len(cores) >= 2 * len(members) else 0


def channel_bytes(world_size: int) -> int:
    """Return the size of the message ring between two ranks; it is smaller in large groups, with world_size² rings."""
    return 256 * 1024 if world_size <= 8 else 64 * 1024 if world_size <= 32 else 16 * 1024


def heap_bytes(world_size: int) -> int:
    """Return the bytes of address space for one rank's heap; pages are allocated only when they are used."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = []
    for limit, used in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, _address_space_used())):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(soft - used, 0))
    return decide_heap_bytes(world_size, total, limits)


def decide_heap_bytes(world_size: int, memory_bytes: int, limits: Sequence[int]) -> int:
    """Return the bytes of address space for one rank's heap: as much as the machine's memory, up to 1 TiB, if possible.

    Every rank maps all ranks' heaps, so together they must fit into half of each of `limits` (what is left of the limit
    on file size, `ulimit -f`, and on address space, `ulimit -v`), and into the larger of 4 TiB and twice the memory. A
    process has 128 TiB of addresses on most machines, and dozens of groups may have a heap.
    """
    most = min(-(-memory_bytes // (1 << 30)) << 30, 1 << 40)
    most = min(most, max(_HEAPS_BYTES, 2 * memory_bytes) // world_size)
    for limit in limits:
        most = min(most, limit // (2 * world_size))
    return max(most // _core.PAGE, 1) * _core.PAGE


def _how_to_get_addresses() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return f"Raise the limit on address space (ulimit -v), now {soft // 1024} KiB, the same on every rank."
    return "Destroy groups that are no longer needed: this process has no addresses or mappings left."


def _address_space_used() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class SymmetricMemory:
    """A `SymmetricMemory` is the memory that this rank shares with the other ranks of its host, mapped in this process.

    `core` runs the collectives. `allocate` is collective, too: all ranks call it with the same size.
    """

    def __init__(
        self,
        fds: Sequence[int],
        rank: int,
        members: Sequence[LocalRank],
        idle: Callable[[float], None],
        *,
        heap_folder: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = len(members)
        self._members = tuple(members)
        self._lock = threading.RLock()  # a finalizer may run at any point, in the same thread
        self._heap: int | None = None
        self.owned_blocks: dict[int, range] = {}
        """The addresses of the blocks that were allocated with an `owner`, by block index."""
        self._blocks_in_use = 0
        self._closed = False
        self._placement: BlockPlacement | None = None
        control, heap, *liveness_pipes = fds
        self._control_bytes = os.fstat(control).st_size
        self._heap_bytes = os.fstat(heap).st_size // self.world_size
        self._watchers = _watchers(liveness_pipes, members, rank)
        self._heap_file: SparseFile | None = None
        try:
            self._control = _core.map(control, self._control_bytes)
            # One mapped page keeps the heap alive until its first use, so a thousand idle groups use no descriptor.
            self._heap_page: int | None = _core.map(heap, _core.PAGE)
            if heap_folder:  # given only on the leader, which reserves room in that file system
                self._heap_file = SparseFile(os.dup(heap), heap_folder)
        except BaseException:
            self._watchers.close()
            raise
        spins = SPIN_NS, _background_spin_ns(members)
        descriptors = self._watchers.fds, self._watchers.stat_fds
        self.core = _core.Group(self._control, self._control_bytes, rank, *spins, *descriptors, idle)
        me = members[rank].process
        self.core.join(me.pid, me.start_ticks)
        _all.add(self)

    @property
    def heap_bytes(self) -> int:
        return self._heap_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def process_of(self, rank: int) -> ProcessId:
        return self._members[rank].process

    def rank_of(self, process: ProcessId) -> int | None:
        """Return the rank of a process; None if it is not in the group."""
        return next((rank for rank, member in enumerate(self._members) if member.process == process), None)

    def allocate(
        self, nbytes: int, deadline: Deadline, call_site: int, check: Callable[[int], None], *, owner: int | None = None
    ) -> Buffer:
        """Allocate a block at the same offset of every rank's heap, and return this rank's piece of `nbytes`.

        With `owner`, every rank gets the owner's piece, so that all ranks have the same memory. The other pieces stay
        unused, and have no pages. The memory outlives its owner.

        All ranks call this. A rank releases the block when its buffer is garbage-collected; the memory is reused, or
        returned to the system, once every rank has released the block. `check` raises for a nonzero status of the core.

        Raises:
            PhalanxError: the heap or its file system has no room for the block, or the heap cannot be mapped.
            ClosedError: the group was destroyed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("shared_empty: the group was destroyed")
            self._blocks_in_use += 1  # from here on `close` leaves the heap mapped: the last release unmaps it
        try:
            return self._allocate(nbytes, deadline, call_site, check, owner)
        except BaseException:
            self._release_heap()
            raise

    def pieces(self, own: Buffer) -> list[Buffer]:
        """Return every rank's piece of a block, by rank; `own`, this rank's result of `allocate`, keeps them alive."""
        begin = ctypes.addressof(own) - self.rank * self._heap_bytes
        others = [(ctypes.c_char * len(own)).from_address(begin + r * self._heap_bytes) for r in range(self.world_size)]
        return [own if rank == self.rank else other for rank, other in enumerate(others)]

    def _allocate(
        self, nbytes: int, deadline: Deadline, call_site: int, check: Callable[[int], None], owner: int | None
    ) -> Buffer:
        self._map_heap()
        message = ctypes.create_string_buffer(_BLOCK.size)
        piece = -1 if owner is None else owner
        if self.rank == 0:
            _BLOCK.pack_into(message, 0, *self._place(nbytes, owner), nbytes, piece)
        span_ns = timeout_ns(deadline.left_s)
        check(self.core.broadcast(ctypes.addressof(message), _BLOCK.size, BYTES, 0, span_ns, call_site, (nbytes,)))
        index, offset, *leaders = _BLOCK.unpack(message.raw)
        if index == _DISK_FULL:
            raise PhalanxError(
                f"shared_empty of {nbytes} bytes: the file system that holds the group's memory is full.\n"
                "Free space there, or allow memfd_create (a seccomp profile forbids it), which needs no file system."
            )
        if index < 0:
            raise PhalanxError(
                f"shared_empty of {nbytes} bytes: the group's heap of {self._heap_bytes} bytes per rank is full, "
                f"or {_core.BLOCKS} blocks are in use.\nRelease tensors that you no longer need."
            )
        if leaders != [nbytes, piece]:
            self.core.set_poison(MISMATCH, self.rank)  # the next sync notifies all ranks
        self.core.claim(index)
        # All ranks claim the block before any can release it: the flags of its last use must not free it.
        check(self.core.barrier(span_ns, call_site, (nbytes,)))
        assert self._heap is not None
        whose = self.rank if owner is None else owner
        buffer = (ctypes.c_char * nbytes).from_address(self._heap + whose * self._heap_bytes + offset)
        if owner is not None and self.world_size > 1:
            self.owned_blocks[index] = range(ctypes.addressof(buffer), ctypes.addressof(buffer) + nbytes)
        weakref.finalize(buffer, self._release_block, index).atexit = False  # tensors may outlive the exit hooks
        return buffer

    def _place(self, nbytes: int, owner: int | None) -> tuple[int, int]:
        """Place a block, on the leader, and return its index and offset; if impossible, a negative index says why."""
        self._collect()
        assert self._placement is not None
        block = self._placement.place(nbytes)
        if block is None:
            return _NO_ROOM, 0
        try:
            with self._lock:
                file = self._heap_file
                for rank in range(self.world_size) if owner is None else (owner,):
                    if file is not None:
                        file.reserve(rank * self._heap_bytes + block.offset, nbytes)
        except PhalanxError:
            self._placement.remove(block)
            return _DISK_FULL, 0
        return block.index, block.offset

    def heap_offset(self, address: int) -> int:
        """Return the offset of an address in this rank's heap; an allocation has the same offset on every rank."""
        if self._heap is None or not 0 <= address - (self._heap + self.rank * self._heap_bytes) < self._heap_bytes:
            raise InternalError(f"address {address:#x} is not in the group's heap. Please report this.")
        return address - self._heap - self.rank * self._heap_bytes

    def address_of(self, rank: int, offset: int) -> int:
        """Return the address in this process of an offset in `rank`'s heap."""
        if self._heap is None or not (0 <= rank < self.world_size and 0 <= offset < self._heap_bytes):
            raise InternalError(f"offset {offset:#x} of rank {rank} is not in the group's heap. Please report this.")
        return self._heap + rank * self._heap_bytes + offset

    def contains(self, address: int) -> bool:
        """Return whether an address is in the heap of this rank or of another rank."""
        return self._heap is not None and 0 <= address - self._heap < self._heap_bytes * self.world_size

    def _collect(self) -> None:
        """Free, on the leader, the blocks that all ranks have released, and return their pages to the system."""
        if self._placement is None:
            self._placement = BlockPlacement(self._heap_bytes, _core.BLOCKS)
        assert self._heap is not None
        for block in self._placement.live:
            if self.core.is_released(block.index):
                for r in range(self.world_size):
                    _core.discard(self._heap + r * self._heap_bytes + block.offset, block.nbytes)
                self._placement.remove(block)

    def _release_block(self, index: int) -> None:
        self.owned_blocks.pop(index, None)
        self.core.release(index)  # no effect once the group is closed
        self._release_heap()

    def _release_heap(self) -> None:
        with self._lock:
            self._blocks_in_use -= 1
            if self._closed and self._blocks_in_use == 0:
                self._unmap_heap()

    def _map_heap(self) -> None:
        if self._heap is not None:
            return
        if self._heap_page is None:
            raise ClosedError("shared_empty: the group was destroyed")
        try:
            self._heap = _core.map_again(self._heap_page, self._heap_bytes * self.world_size)
        except OSError as error:
            raise PhalanxError(
                f"shared_empty: the group's heap of {self._heap_bytes} bytes for each of {self.world_size} ranks "
                f"cannot be mapped: {error.strerror}.\n{_how_to_get_addresses()}"
            ) from None
        self._unmap_page()
        self.core.set_heaps(tuple(self._heap + r * self._heap_bytes for r in range(self.world_size)), self._heap_bytes)

    def _unmap_heap(self) -> None:
        if self._heap is not None:
            _core.unmap(self._heap, self._heap_bytes * self.world_size)
            self._heap = None

    def _unmap_page(self) -> None:
        if self._heap_page is not None:
            _core.unmap(self._heap_page, _core.PAGE)
            self._heap_page = None

    def close(self) -> None:
        """Leave the group. Notify at once the ranks that wait for this rank, and this process's threads in the core.

        The memory is released when the last of these threads has left the core. Shared tensors stay valid while they
        exist.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _all.discard(self)
        self.core.close(self._release_memory)

    def close_for_good(self) -> None:
        """Close at the end of the process: threads may stay in the core, so the memory stays mapped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._blocks_in_use += 1
        self.core.close(None)

    def _release_memory(self) -> None:
        """Release the memory; called once no thread is in the core or can enter it."""
        _core.unmap(self._control, self._control_bytes)
        self._watchers.close()
        with self._lock:
            if self._heap_file is not None:
                os.close(self._heap_file.fd)
                self._heap_file = None
            self._unmap_page()
            if self._blocks_in_use == 0:
                self._unmap_heap()

    def abandon(self) -> None:
        """Abandon the group in a forked child, without touching the memory: it belongs to the parent."""
        self._closed = True
        self.core.abandon()
        if isinstance(self._watchers, LivenessPipes):
            self._watchers.close()  # otherwise the parent would still seem alive after its exit


_all: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()


def _processes(members: Sequence[LocalRank]) -> list[ProcessId]:
    return [member.process for member in members]


def _watchers(liveness_pipes: Sequence[int], members: Sequence[LocalRank], rank: int) -> Pidfds | LivenessPipes:
    return LivenessPipes(liveness_pipes, rank) if liveness_pipes else Pidfds(_processes(members), rank)


def _after_fork() -> None:
    for symm_mem in list(_all):
        symm_mem.abandon()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _new_memory(members: Sequence[LocalRank], stage_bytes: int) -> Iterator[tuple[int, SparseFile]]:
    """Yield the files of the control memory, formatted, and of the heap, empty; close them on exit."""
    world_size = len(members)
    channel = channel_bytes(world_size)
    nbytes = _core.group_bytes(world_size, stage_bytes, channel)
    with (
        memory("phalanx-control", nbytes) as control,
        sparse_memory("phalanx-heap", heap_bytes(world_size) * world_size) as heap,
    ):
        address = _core.map(control, nbytes)
        try:
            _core.format(address, world_size, stage_bytes, channel, int(is_oversubscribed(members)))
        finally:
            _core.unmap(address, nbytes)
        yield control, heap


def open_as_leader(
    server: FdServer,
    members: Sequence[LocalRank],
    deadline: Deadline,
    notice: Notice,
    idle: Callable[[float], None],
    *,
    stage_bytes: int = STAGE_BYTES,
    register: Callable[[int], object] | None = None,
) -> SymmetricMemory:
    """Create the memory as rank 0 of the host, and send it to the host's other ranks.

    Data are copied through the memory in chunks of `stage_bytes`, each with a sync. `register` is called with the
    control memory's descriptor before any rank waits, so that another process can observe the group.

    Raises:
        DeadlineError: some ranks did not fetch the memory; `missing` lists them.
    """
    world_size = len(members)
    with (
        _new_memory(members, stage_bytes) as (control, heap),
        new_pipes(world_size if needs_liveness_pipes(_processes(members)) else 0) as pipes,
    ):
        reads, writes = pipes
        symm_mem = SymmetricMemory(
            [control, heap.fd, *reads, *writes[:1]], 0, members, idle, heap_folder=heap.in_folder
        )
        if register is not None:
            register(control)
        try:
            own = dict(enumerate(writes))
            server.serve(range(1, world_size), [control, heap.fd, *reads], deadline, notice, own=own)
        except BaseException:
            symm_mem.close()
            raise
        return symm_mem


def open_as_member(
    address: LocalAddress,
    rank: int,
    members: Sequence[LocalRank],
    deadline: Deadline,
    idle: Callable[[float], None],
    check: Callable[[], None] = lambda: None,
) -> SymmetricMemory:
    """Fetch the memory from rank 0 of the host; `check` is called repeatedly during the wait, and may raise.

    Raises:
        DeadlineError: rank 0 did not answer in time.
        PhalanxError: rank 0 is lost.
    """
    count = 2 + (len(members) + 1 if needs_liveness_pipes(_processes(members)) else 0)
    fds = receive_fds(address, rank, count, deadline, check=check)
    try:
        return SymmetricMemory(fds, rank, members, idle)
    finally:
        for fd in fds:
            os.close(fd)


# The shared heap has a part of the same size for every rank, and every rank maps all parts.
#
# A block has the same offset in every rank's heap, so an offset names P pieces of memory, one per rank. The leader
# places blocks and sends the offsets. Each rank releases a block when its garbage collector frees the buffer, and sets
# a `released` flag in the control memory; once all ranks have done so, the leader may reuse the block.

ALIGN = 4096  # the page size, so that a released block can be returned to the system


@dataclass(frozen=True)
class HeapBlock:
    """A `HeapBlock` is a piece of every rank's heap, at `offset`; `index` is the index of its flags."""

    index: int
    offset: int
    nbytes: int


class BlockPlacement:
    """A `BlockPlacement` places blocks, by first fit in the gaps between live blocks; only the leader keeps one."""

    def __init__(self, heap_bytes: int, max_blocks: int) -> None:
        self.heap_bytes = heap_bytes
        self._free_indices = list(range(max_blocks - 1, -1, -1))
        self._live: list[tuple[int, HeapBlock]] = []  # by offset

    @property
    def live(self) -> list[HeapBlock]:
        """Return the blocks that some rank may still use, by offset."""
        return [block for _, block in self._live]

    def place(self, nbytes: int) -> HeapBlock | None:
        """Place a block of at least `nbytes`; return None if the heap has no large enough gap or no free index."""
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        if not self._free_indices:
            return None
        at = 0
        for offset, block in self._live:
            if offset - at >= size:
                break
            at = offset + block.nbytes
        if at + size > self.heap_bytes:
            return None
        block = HeapBlock(self._free_indices.pop(), at, size)
        bisect.insort(self._live, (at, block), key=lambda item: item[0])
        return block

    def remove(self, block: HeapBlock) -> None:
        """Free `block`, which every rank has released."""
        self._live.remove((block.offset, block))
        self._free_indices.append(block.index)
