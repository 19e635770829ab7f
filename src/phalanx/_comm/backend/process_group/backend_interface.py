"""Answer what torch and its users ask of a backend object: a group of ours is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from phalanx._base.torch_names import find
from phalanx._comm.backend import splitting
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.torch_integration.groups import TorchGroup
from phalanx.errors import DeadlineError, PeerLostError

_backend: Any = find("torch._C._distributed_c10d.Backend", loses="a group lacks a backend's Options", instead=None)
_ErrorType: Any = find("torch._C._distributed_c10d.ErrorType", loses="get_error() of a group does not work")
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"Backend {self.getBackendName()} does not support {what}")

    return refuse


@untraced
class BackendInterface(TorchGroup):
    """A group has every attribute of `Backend`. What Gloo refuses, it refuses in torch's words and with its error."""

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
    new_window = _refuse("new_window")  # torch's own answer ends the process
    _start_time_estimate = _end_time_estimate = _refuse("time estimation")
    _register_on_completion_hook = _refuse("onCompletion hooks")
    _wait_for_pending_works = _refuse("waitForPendingWorks")

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        """Set `use_pg_for_symm_mem_rendezvous`, which torch reads for memory of GPUs alone."""
        self.use_pg_for_symm_mem_rendezvous = value

    def _set_group_uid(self, pg_uid: str) -> None:
        """Do nothing: torch's own log names groups by it."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing, as Gloo."""

    def get_error(self) -> Any:
        """Return torch's `ErrorType` for the failure of an operation that ran in the background."""
        error = self.find_failure()
        if error is None:
            return _ErrorType.SUCCESS
        if isinstance(error, DeadlineError):
            return _ErrorType.TIMEOUT
        return _ErrorType.REMOTE_ERROR if isinstance(error, PeerLostError) else _ErrorType.COMM_ERROR

    def find_failure(self) -> BaseException | None:
        """Return the error of an operation that ran in the background, or None."""
        raise NotImplementedError

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: a rank that is not in a group of `new_group` has no part in its making."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the members are connected from the start."""

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> Any:
        """Return the group of these ranks, which meet in `store`; None where this rank is not among them."""
        if self.rank() not in ranks:
            return None
        return splitting.meet(self, store, list(ranks).index(self.rank()), len(ranks), opts._timeout)

    def merge(self, store: Store, opts: Any, rank: int, size: int) -> Any:
        """Return a group of `size` ranks, of this group and of others, which meet in `store`."""
        return splitting.meet(self, store, rank, size, opts._timeout)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Return a group of `size` ranks, of this group and of others, numbered as they come to `store`."""
        rank = store.add("mergeGroupRank", 1) - 1
        name, description = group_name or f"{self.group_name}:merge", group_desc or f"{self.group_desc}:merge"
        return splitting.meet(self, store, rank, size, timeout, name=name, description=description)
