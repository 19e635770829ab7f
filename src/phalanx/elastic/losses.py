"""Decide whether an error is a loss, which an elastic job survives, or an error of the program, which ends it."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from phalanx.errors import DeadlineError, MismatchError, PeerLostError, PhalanxError


class NewGenerationError(PhalanxError):
    """Other ranks wait to join, so all ranks stop at a commit and form a new group."""


def is_mismatch(error: BaseException) -> bool:
    """Return whether `error`, or an error in its chain, is a mismatch between ranks; a new attempt would repeat it."""
    return _has(error, (MismatchError,))


def is_loss(error: BaseException) -> bool:
    """Return whether `error`, or an error in its chain, is a lost peer, a timeout, or the end of the generation."""
    return _has(error, (PeerLostError, DeadlineError, NewGenerationError, dist.DistBackendError, dist.DistNetworkError))


def _has(error: BaseException, types: tuple[type[BaseException], ...]) -> bool:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        if isinstance(now, types):
            return True
        seen.add(id(now))
        now = now.__cause__ or now.__context__
    return False


def forget(error: BaseException) -> None:
    """Clear the error's tracebacks, their frames and its chain, which ends iterators and a loader's workers."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        if now.__traceback__ is not None:
            traceback.clear_frames(now.__traceback__)
            now.__traceback__ = None
        before, now = now, now.__cause__ or now.__context__
        before.__cause__ = before.__context__ = None
