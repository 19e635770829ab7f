"""Agree on the result at the end of a step: the same loss on all ranks, or an error on all ranks.

A rank that has completed its actions cannot know whether the others will complete theirs: the first stage may fail in
its last backward, long after the last stage has computed its loss. So all ranks, and all replicas, reduce a few numbers
at the end of a step.

Only ranks in a group of the lost rank detect the loss. A rank that detects it and shares another group with ranks that
cannot detect it aborts that group, so that they detect it there. MPI's ULFM calls this revoking a communicator.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError, message_of
from phalanx.pipeline.early_all_reduce import LEAVING_S, EarlyAllReduce, reduces_early
from phalanx.pipeline.failure import StageFailedError, StageLostError, with_note
from phalanx.pipeline.progress import StepProgress

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_COMPLETED_ALONE = "Pipeline: this rank has completed its part of the step, but another rank was lost. Read its log."
_LOST, _INTERRUPTED = 1e6, 1e12  # each exceeds the sum of the smaller flags of all ranks
_NAMED = -1.0  # in place of the loss's dtype: the loss's field then contains the lost rank


class StepOutcome:
    """A `StepOutcome` lets all ranks agree on how `step` ends; `data_group` has one rank per replica."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        data_group: dist.ProcessGroup | None,
        device: torch.device,
        tag: int,
        step: StepProgress,
    ) -> None:
        """Create the agreement. All ranks call it. No other message of the group may use the tag `tag`."""
        self._early = EarlyAllReduce(group, tag) if reduces_early(group) else None
        self._group, self._data_group, self._device = group, data_group, device
        self._step = step
        self._last_works: list[Any] = []

    def begin(self) -> None:
        """Begin a step, which ends with `share` or `leave`."""
        if self._early is not None:
            self._early.begin(3)

    def share(self, loss: Tensor | None, error: Exception | None, *, replicas: bool) -> Tensor:
        """Return on every rank the loss of the one rank that has it; with `replicas`, the mean over the replicas.

        Raises:
            `error`, if this rank has one, or the group's error, if this rank detects a loss.
            StageFailedError: another rank has an error; the message is that of its error.
            StageLostError: another rank has reported that a rank of this or of another pipeline is lost.
        """
        numbers = [0.0, 0.0] if loss is None else [loss.item(), float(_DTYPES.index(loss.dtype))]
        try:
            (value, dtype), error = self._sum(self._group, numbers, error)
        except Exception as lost:
            self.leave(lost=True)
            if isinstance(lost, PhalanxError):
                raise
            raise (with_note(lost, _COMPLETED_ALONE) if error is None else error) from lost.__cause__
        if replicas and self._data_group is not None:
            try:
                (total,), error = self._sum(self._data_group, [value], error)
            except Exception:
                _revoke(self._group)
                raise
            value = total / self._data_group.size()
        if isinstance(error, StageLostError):
            _revoke(self._group)
        if error is not None:
            raise error
        self._step.agree()
        return torch.tensor(value, dtype=_DTYPES[int(dtype)], device=self._device)

    @property
    def needs_notices(self) -> bool:
        """Return whether ranks that cannot detect a loss must be notified, because nothing aborts their group."""
        return self._early is not None

    def leave(self, *, lost: bool, peer: int | None = None) -> None:
        """End this rank's step without making the others wait: this rank was interrupted, or (`lost`) a peer died.

        `peer` is the lost rank, if known.
        """
        self._leave_early(lost=lost, peer=peer)
        groups = [self._data_group] if lost or self._early is not None else [self._group, self._data_group]
        for group, numbers in zip(groups, (2, 1)[-len(groups) :], strict=True):
            if group is not None:
                with contextlib.suppress(RuntimeError):  # a peer is lost there, too
                    words = torch.tensor(
                        [0.0] * numbers + [_LOST if lost else _INTERRUPTED], dtype=torch.float64, device="cpu"
                    )
                    self._last_works.append((dist.all_reduce(words, group=group, async_op=True), words))

    def _leave_early(self, *, lost: bool, peer: int | None) -> None:
        if self._early is None:
            return
        peer = self._early.lost if peer is None else peer
        last = [0.0, 0.0, _LOST if lost else _INTERRUPTED]
        if lost and peer is not None and self._group.rank() == 0:  # the others receive these numbers instead of a sum
            last[:2] = float(peer), _NAMED
        self._early.leave(torch.tensor(last, dtype=torch.float64, device="cpu"), stay_s=0.0 if lost else LEAVING_S)

    def abort(self, error: BaseException) -> None:
        """Fail the step after the agreement, when the others may be waiting for this rank in either group.

        With an `EarlyAllReduce`, they receive this rank's last message at the end of their next step.
        """
        self._leave_early(lost=isinstance(error, Exception), peer=None)
        if self._data_group is None and isinstance(error, (PeerLostError, DeadlineError)):
            return  # its only group has failed, and all ranks detect it
        _revoke(self._group)
        if self._data_group is not None:
            _revoke(self._data_group)

    def _sum(
        self, group: dist.ProcessGroup, numbers: list[float], error: Exception | None
    ) -> tuple[list[float], Exception | None]:
        """Return the sums of `numbers` over the group; and an error, on all ranks, if any rank has one."""
        words = torch.tensor([*numbers, float(error is not None)], dtype=torch.float64, device="cpu")
        if self._early is not None and group is self._group:
            self._early.add(words)
        else:
            dist.all_reduce(words, group=group)
        *sums, failures = words.tolist()
        if not failures:
            return sums, None
        if failures >= _INTERRUPTED:
            return numbers, error or StageFailedError("Pipeline: another rank of this step was interrupted.")
        if failures >= _LOST:
            own = group is self._group
            lost = f"rank {sums[0]:.0f}" if own and sums[1] == _NAMED else "a rank"
            fact = f"{lost} of the pipeline was lost" if own else "a replica has lost a rank of its pipeline"
            return numbers, error or StageLostError(f"Pipeline: {fact}. Read its log.")
        self._step.abort()
        found: list[Any] = [None] * group.size()
        mine = None if error is None else (isinstance(error, StageFailedError), message_of(error), type(error).__name__)
        dist.all_gather_object(found, mine, group=group)
        if error is not None:
            return numbers, error
        # an error that no other error caused sorts first
        _, text, kind = min(one for one in found if one is not None)
        return numbers, StageFailedError(text if kind == StageFailedError.__name__ else f"{kind}: {text}")


def _revoke(group: dist.ProcessGroup) -> None:
    """Abort the group for all of its ranks: those that wait in it, or use it later, raise as for a lost rank.

    With other backends, the other ranks get an error only when this process ends.
    """
    if (ours := phalanx_group(group)) is not None:
        ours.abort()
