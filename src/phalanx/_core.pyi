"""Types of the C core; contracts are in csrc/collectives.h and csrc/py_*.c. Addresses, bytes and counts are ints."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

# csrc/py_numbers.c; what they mean is in csrc/layout.h
VERSION: int
MAX_WORLD: int
PAGE: int
BLOCKS: int
RECORDS: int
CALL_SITES: int
PENDING: int
BARRIER: int
BROADCAST: int
ALL_REDUCE: int
REDUCE: int
ALL_GATHER: int
GATHER: int
SCATTER: int
REDUCE_SCATTER: int
ALL_TO_ALL: int
SEND: int
RECV: int
GRADIENTS: int
BROADCAST_BUFFERS: int
BYTES: int
BOOL: int
U8: int
I8: int
U16: int
I16: int
U32: int
I32: int
U64: int
I64: int
F16: int
BF16: int
F32: int
F64: int
C64: int
C128: int
SUM: int
AVG: int
PRODUCT: int
MIN: int
MAX: int
BAND: int
BOR: int
BXOR: int
OK: int
MISMATCH: int
PEER_LOST: int
DEADLINE: int
INTERRUPTED: int
INVALID: int
NO_MEMORY: int
CLOSED: int
ABSENT: int
JOINED: int
LEFT: int
FLAG_SPLITS: int

_Shape = tuple[int, ...]
_Record = tuple[int, int, int, int, int, int, int, _Shape, int, int, int, str, int]

class Group:
    failed_rank: int
    seq: int
    oversubscribed: bool

    def __init__(
        self,
        address: int,
        nbytes: int,
        rank: int,
        spin_ns: int,
        background_spin_ns: int,
        pidfds: tuple[int, ...],
        stat_fds: tuple[int, ...],
        idle: Callable[[float], None] | None,
        /,
    ) -> None: ...
    def barrier(self, timeout_ns: int, call_site: int, shape: _Shape, /) -> int: ...
    def all_reduce(
        self,
        src: int,
        dst: int,
        count: int,
        dtype: int,
        redop: int,
        root: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def broadcast(
        self,
        data: int,
        nbytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def broadcast_buffers(
        self,
        data: int,
        nbytes: int,
        area: int,
        dtype: int,
        root: int,
        number: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def reduce_scatter(
        self,
        src: tuple[int, ...],
        counts: tuple[int, ...],
        dst: int,
        dtype: int,
        redop: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def gather(
        self,
        src: int,
        dst: tuple[int, ...] | None,
        nbytes: tuple[int, ...],
        dtype: int,
        root: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def scatter(
        self,
        src: tuple[int, ...] | None,
        dst: int,
        nbytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def all_to_all(
        self,
        src: tuple[int, ...],
        src_bytes: tuple[int, ...],
        dst: tuple[int, ...],
        dst_bytes: tuple[int, ...],
        dtype: int,
        splits: int,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def send(
        self, data: int, nbytes: int, dst: int, tag: int, dtype: int, timeout_ns: int, call_site: int, shape: _Shape, /
    ) -> int: ...
    def send_now(
        self, data: int, nbytes: int, dst: int, tag: int, dtype: int, timeout_ns: int, call_site: int, shape: _Shape, /
    ) -> int | None: ...
    def post(
        self,
        receive: Receive,
        data: int,
        nbytes: int,
        src: int,
        tag: int,
        dtype: int,
        handed_over: bool,
        timeout_ns: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def take_ended(self, to: list[Receive], /) -> None: ...
    def set_timeout(self, receive: Receive, timeout_ns: int, /) -> None: ...
    def progress(self, receive: Receive, limit_ns: int, /) -> int: ...
    def poll(self) -> None: ...
    def progress_thread(self) -> None: ...
    def stop_progress_thread(self) -> None: ...
    def join(self, pid: int, start_ticks: int, /) -> None: ...
    def add_call_site(self, text: str, /) -> int: ...
    def set_exit_reason(self, text: str, /) -> None: ...
    def state(self, rank: int, /) -> tuple[int, int, int, int, int, str]: ...
    def records(self, rank: int, /) -> list[_Record]: ...
    def hide_steps(self) -> None: ...
    def set_awaited(self, awaited: bool, /) -> None: ...
    def begin_record(
        self,
        seq: int,
        kind: int,
        dtype: int,
        redop: int,
        root: int,
        peer: int,
        count: int,
        call_site: int,
        shape: _Shape,
        /,
    ) -> int: ...
    def end_record(self, number: int, status: int, /) -> None: ...
    def poison(self) -> tuple[int, int]: ...
    def set_poison(self, code: int, rank: int, /) -> int: ...
    def failure(self) -> str: ...
    def set_failure(self, text: str, /) -> bool: ...
    def issue(self) -> None: ...
    def carried_out(self) -> None: ...
    def alive(self, rank: int, /) -> bool: ...
    def set_heaps(self, addresses: tuple[int, ...], nbytes: int, /) -> None: ...
    def claim(self, block: int, /) -> None: ...
    def release(self, block: int, /) -> None: ...
    def is_released(self, block: int, /) -> bool: ...
    def close(self, let_go: Callable[[], None] | None, /) -> None: ...
    def settle(self, timeout_ns: int, /) -> bool: ...
    def abandon(self) -> None: ...

class Receive:
    """A receive that was posted. `status` is -1 until it is over; from then on `source` says who sent."""

    status: int
    source: int

class Reducer:
    def __init__(self, group: Group, flags: int, buckets: tuple[tuple[int, int, int], ...], /) -> None: ...
    def begin(self) -> None: ...
    def ready(self, bucket: int, offset: int, start: int = ..., stop: int = ..., /) -> int: ...
    def finish(self, timeout_ns: int, call_site: int, /) -> int: ...

class Pool:
    def __init__(self, address: int, nbytes: int, classes: tuple[tuple[int, int], ...], /) -> None: ...
    def enter(self) -> bool: ...
    def leave(self) -> None: ...
    def used(self) -> int: ...
    def delete(self) -> bool: ...

class EventLog:
    def __init__(
        self, address: int, capacity: int, begin_update: float, end_update: float, on_due: Callable[[], object], /
    ) -> None: ...
    def mark(self, kind: float, value: float = 0.0, now: float = ..., /) -> None: ...
    def begin_update(self, optimizer: object = None, /, *unused: object) -> None: ...
    def end_update(self, /, *unused: object) -> None: ...
    def take(self) -> None: ...
    def took(self, number: int, limit: int, due: float, /) -> None: ...
    def close(self) -> None: ...

def pools_after_fork() -> None: ...
def reducer_bytes(num_buckets: int, /) -> int: ...
def map(fd: int, nbytes: int, /) -> int: ...
def map_again(address: int, nbytes: int, /) -> int: ...
def unmap(address: int, nbytes: int, /) -> None: ...
def discard(address: int, nbytes: int, /) -> None: ...
def start_writeback(fd: int, offset: int, nbytes: int, /) -> None: ...
def group_bytes(world: int, stage_bytes: int, channel_bytes: int, /) -> int: ...
def format(address: int, world: int, stage_bytes: int, channel_bytes: int, oversubscribed: int, /) -> None: ...
def can_reduce(dtype: int, redop: int, /) -> bool: ...
def reduce(dst: int, src: tuple[int, ...], count: int, dtype: int, redop: int, /) -> None: ...
def wait_ready(fd: int, bell: int, spin_ns: int, timeout_ms: int, /) -> int: ...
def crc32_of_range(fd: int, begin: int, nbytes: int, crc: int, /) -> tuple[int, int]: ...
def crc32_is_fast() -> bool: ...
def fold_pairs(
    values: dict[Any, Any],
    mapped: Iterator[Iterable[Any]],
    combine: Callable[[Any, Any], Any] | None,
    adds: bool,
    limit: int,
    progress: list[Any],
    /,
) -> None: ...

class TextSums:
    def __new__(cls, seed: int, /) -> TextSums: ...
    def __len__(self) -> int: ...
    def fold(self, mapped: Iterator[Iterable[Any]], limit_bytes: int, progress: list[Any], /) -> None: ...
    def add(self, packed: bytes, /) -> int: ...
    def sort(self) -> None: ...
    def partition(self, partitions: int, /) -> list[int]: ...
    def pack(self, start: int, stop: int, /) -> bytes: ...
    def items(self, start: int, stop: int, /) -> tuple[list[Any], list[int]]: ...
    def key_type(self) -> type: ...
    def is_packable(self) -> bool: ...
    def held_bytes(self) -> int: ...
    def text_bytes(self) -> int: ...

def load_word(address: int, /) -> int: ...
def store_word(address: int, value: int, /) -> None: ...
def compare_exchange_word(address: int, expected: int, desired: int, /) -> int: ...
