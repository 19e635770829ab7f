"""`Peers` exchange data about a checkpoint between ranks over any backend, also in a process without a group."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist

from phalanx._comm.backend.shared import default_group, is_joining
from phalanx.errors import CheckpointError, PhalanxError

T = TypeVar("T")

_COLLECTIVE = (
    "{what} is collective: every rank must call it, at the same step. Call it on every rank, not under `if rank == 0`."
)


def _identity(file: BinaryIO | Path | None) -> tuple[object, ...]:
    """Return a value that is equal on ranks of one machine with the same file; () if unknown."""
    if file is None:
        return ()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        status = os.stat(file if isinstance(file, Path) else file.fileno())
    except OSError:
        return ()
    return boot, status.st_dev, status.st_ino


class Peers:
    """`Peers` are the ranks of `group`, of the default group if None, or this process alone if there is no group.

    `what` names the call in errors. All methods that communicate are collective.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, what: str = "a checkpoint") -> None:
        self.what = what
        group = default_group() if group is None else group
        self.is_joining = group is not None and is_joining(group)
        """Whether this rank is joining a running job and is not in its group yet; such a rank saves nothing."""
        if self.is_joining:  # such a rank reads alone
            group = None
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        if self.rank < 0:
            raise ValueError(f"{what}: this rank is not a member of the process group; only members may call it")
        self.world_size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def alone(cls, what: str) -> Peers:
        """Return peers of this process alone, whatever group it is in."""
        peers = cls.__new__(cls)
        peers.what, peers.group, peers.rank, peers.world_size, peers.is_joining = what, None, 0, 1, False
        return peers

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0 of the group, which decides for all ranks."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._call(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        self._call(lambda: dist.gather_object(value, values, group=self.group, group_dst=0))
        return values or []

    def broadcast(self, value: T, *, src: int = 0) -> T:
        """Return rank `src`'s value, on every rank."""
        if self.world_size == 1:
            return value
        values = [value if self.rank == src else None]
        self._call(lambda: dist.broadcast_object_list(values, group=self.group, group_src=src))
        return values[0]  # type: ignore[return-value]

    def is_same_file(self, file: BinaryIO | Path | None) -> bool:
        """Return whether all ranks are on one machine and pass the same file (open, or as a path)."""
        identities = self.all_gather(_identity(file))
        return all(identity == identities[0] != () for identity in identities)

    def broadcast_tensor(self, tensor: torch.Tensor, *, src: int) -> None:
        """Copy `tensor`, contiguous and on the CPU, from rank `src` to every rank."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        # reshape does not suffice: the stride of a single element may be anything, and a view as bytes requires 1.
        content = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        on_device = content.to(self.device)
        self._call(lambda: dist.broadcast(on_device, group=self.group, group_src=src))
        if on_device is not content:
            content.copy_(on_device)

    def agree_with_first(self, problem: str | None, cause: Exception | None = None) -> None:
        """Raise if rank 0 has a problem; the problems of other ranks are ignored.

        Raises:
            CheckpointError: rank 0 has a problem; on every rank.
        """
        problem = self.broadcast(problem)
        if problem is not None:
            raise CheckpointError(problem) from cause

    def agree(
        self, problem: str | None, cause: Exception | None = None, *, kind: type[CheckpointError] = CheckpointError
    ) -> None:
        """Raise `kind` if any rank has a problem.

        Raises:
            CheckpointError: the problem of the first such rank; on every rank.
        """
        problems = [(rank, text) for rank, text in enumerate(self.all_gather(problem)) if text is not None]
        if problems:
            also = f" Other ranks that also have a problem: {len(problems) - 1}." if len(problems) > 1 else ""
            raise kind(problems[0][1] + also) from cause

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors for collectives: the CPU if the group supports it."""
        assert self.group is not None
        devices = self.group._device_types
        cpu = torch.device("cpu")
        return cpu if cpu in devices or not devices else torch.device(devices[0].type)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PhalanxError as error:
            error.args = (f"{error}\n{_COLLECTIVE.format(what=self.what)}", *error.args[1:])
            raise
