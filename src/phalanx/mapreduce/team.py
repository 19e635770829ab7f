"""A `Team` is the ranks that run a job together: it carries their messages, and detects lost ranks.

A team is a process group, or this process alone. A failed operation of the group raises `PeerLostError` with the lost
ranks, as far as they are known. Gloo's errors name no ranks, so the team checks the processes of this host's ranks.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import CHECK_S, MAP_REDUCE_AFTER_BREAK_S
from phalanx._comm.backend.shared import default_group, is_joining
from phalanx._comm.backend.torch_integration.groups import phalanx_group, pickle_authenticator, store_of
from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx._comm.rendezvous.torch_store import Store
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._comm.transport.authentication import OVERHEAD_BYTES, PickleStream
from phalanx.errors import DeadlineError, MismatchError, PeerLostError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def _tensor_over(data: bytearray) -> torch.Tensor:
    """Return a tensor over `data`, whose memory Python has allocated.

    PyTorch allocates aligned memory, and glibc before 2.38 takes new memory for each such allocation: the process would
    grow by the size of the whole shuffle.
    """
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class RankProcess:
    """A `RankProcess` identifies the process of a rank, and its host."""

    host: str
    process: ProcessId

    @classmethod
    def of_self(cls) -> RankProcess:
        return cls(host_identity(), ProcessId.of_self())


@dataclass
class Team:
    """A `Team` is this rank's view of all ranks of a job. `group` is None for a single process."""

    group: dist.ProcessGroup | None
    store: Store
    processes: list[RankProcess] = field(default_factory=list)
    _next_check: float = 0.0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Team:
        """Return the team of `group` (None: the default group), or of this process if there is no other rank.

        Raises:
            ValueError: this rank is not in the group.
        """
        group = default_group() if group is None else group
        if cast(Any, group) is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("map_reduce: this rank is not in the group; only ranks of the group may call it")
        if group is None or group.size() == 1 or is_joining(group):
            return cls(None, dist.HashStore(), [RankProcess.of_self()])
        return cls(group, cast(Store, store_of(group)))

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def timeout_s(self) -> float:
        """Return the timeout of the group's operations, in seconds."""
        assert self.group is not None
        if (ours := phalanx_group(self.group)) is not None:
            return ours.timeout_s
        return float(self.group._get_backend(self._device()).options._timeout.total_seconds())

    # -- messages -------------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank. All ranks call it."""
        if self.group is None:
            return [value]
        data = pickle.dumps(value, protocol=5)
        lengths = [int(length) for length in self._exchange_lengths([len(data)] * self.size)]
        return [pickle.loads(found) for found in self.all_to_all([data] * self.size, lengths)]

    def all_to_all(self, parts: Sequence[bytes], lengths: Sequence[int]) -> list[memoryview]:
        """Send each rank its part; return the received parts, whose sizes are `lengths`. All ranks call it."""
        if self.group is None:
            return [memoryview(parts[0])]
        device, pickles = self._device(), pickle_authenticator(self.group)
        due: list[tuple[PickleStream, int]] = []
        if pickles is not None:  # pickles, or pieces of them
            parts = [pickles.send(part, PickleStream("map_reduce", self.rank, peer)) for peer, part in enumerate(parts)]
            lengths = [length + OVERHEAD_BYTES for length in lengths]
            streams = [PickleStream("map_reduce", peer, self.rank) for peer in range(self.size)]
            due = [(stream, pickles.count_received(stream)) for stream in streams]
        send = _tensor_over(bytearray().join(parts)).to(device)
        receive = _tensor_over(bytearray(sum(lengths))).to(device)
        self._run(
            lambda: dist.all_to_all_single(
                receive, send, list(lengths), [len(part) for part in parts], group=self.group, async_op=True
            )
        )
        view = memoryview(cast(Any, receive.cpu().numpy()))
        found, start = [], 0
        for peer, length in enumerate(lengths):
            piece = view[start : start + length]
            found.append(piece if pickles is None else memoryview(pickles.verify(piece, *due[peer])))
            start += length
        return found

    def _exchange_lengths(self, lengths: Sequence[int]) -> list[int]:
        send = torch.tensor(lengths, dtype=torch.int64, device=self._device())
        receive = torch.empty_like(send)
        self._run(lambda: dist.all_to_all_single(receive, send, group=self.group, async_op=True))
        found: list[int] = receive.tolist()
        return found

    def _device(self) -> torch.device:
        assert self.group is not None
        devices = self.group._device_types
        if torch.device("cpu") in devices:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _run(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            if phalanx_group(self.group) is None:
                # With Gloo, `wait` takes minutes to fail if none of this rank's neighbours has left the group.
                self.wait_until(work.is_completed)
            work.wait()
        except (PeerLostError, MismatchError, DeadlineError):
            raise
        except RuntimeError as error:  # DistBackendError and DistNetworkError are among them
            raise self._lost(error) from error

    # -- membership -----------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll `condition` until it is true.

        Raises:
            PeerLostError: a rank of this host has ended.
        """
        Deadline.after(None).wait_until(condition, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, check=self.check_peers)

    def check_peers(self) -> None:
        """Check whether the processes of this host's other ranks are alive, at most once per `CHECK_S`.

        Raises:
            PeerLostError: a rank's process has ended.
        """
        now = time.monotonic()
        if self.group is None or now < self._next_check:
            return
        self._next_check = now + CHECK_S
        if ended := self.find_ended():
            raise PeerLostError(self._describe_ended(ended), ranks=ended)

    def find_ended(self) -> tuple[int, ...]:
        """Return the ranks of this host whose process has ended."""
        if not self.processes:
            return ()
        me = self.processes[self.rank]
        return tuple(
            rank
            for rank, process in enumerate(self.processes)
            if rank != self.rank and process.host == me.host and process.process.has_ended()
        )

    def _lost(self, error: RuntimeError) -> PeerLostError:
        Deadline.after(MAP_REDUCE_AFTER_BREAK_S).wait_until(self.find_ended, _LONGEST_PAUSE_S)
        ended = self.find_ended()
        text = self._describe_ended(ended) if ended else f"map_reduce: an operation of the group failed: {error}"
        return PeerLostError(text, ranks=ended)

    def _describe_ended(self, ranks: tuple[int, ...]) -> str:
        named = ", ".join(f"{rank} (pid {self.processes[rank].process.pid})" for rank in ranks)
        return f"map_reduce: rank{'s' * (len(ranks) > 1)} {named} {'have' if len(ranks) > 1 else 'has'} ended"
