"""Keep the newest groups that ranks have shown to the agent, and what is known of older ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx._comm.diagnostics.observer import GroupInfo, GroupLog, Observer

MAX_OBSERVED = 64  # the agent keeps the memory of at most so many groups alive
_MAX_ENDED = 64  # it keeps the logs of so many groups whose memory was closed


class Flights:
    """`Flights` holds the memory of at most `MAX_OBSERVED` groups, and for a while the logs of ended or older ones."""

    def __init__(self) -> None:
        self._observed: list[Observer] = []
        self._ended: deque[GroupLog] = deque(maxlen=_MAX_ENDED)

    def add(self, message: Mapping[str, Any], fds: Sequence[int], lost: Collection[int] = ()) -> None:
        """Add a group that a rank shows; the descriptors become ours. A group that cannot be read is not kept.

        `lost` are processes that have ended while others have gone on: the groups of those are over.
        """
        kept = -1
        try:
            group_info = GroupInfo(
                str(message["name"]),
                int(message["world_size"]),
                tuple(int(rank) for rank in message["ranks"]),
                tuple(int(pid) for pid in message["pids"]),
            )
            if len(group_info.ranks) == len(group_info.pids) and len(fds) == 1:
                observer = Observer(group_info, fds[0])
                kept = fds[0]
                self._let_go_of_ended(lost)
                self._observed.append(observer)
        except (ImportError, KeyError, TypeError, ValueError, OverflowError, OSError):
            pass  # another version of Phalanx in the ranks, or somebody's mistake: the job goes on unobserved
        finally:
            for fd in fds:
                if fd != kept:
                    os.close(fd)

    @property
    def observed(self) -> tuple[Observer, ...]:
        """Return the groups whose memory is mapped, the oldest first."""
        return tuple(self._observed)

    def logs(self) -> list[GroupLog]:
        """Return what all known groups did, the oldest group first."""
        return [*self._ended, *(log for observer in self._observed if (log := _read(observer)) is not None)]

    def close(self) -> None:
        for observer in self._observed:
            observer.close()
        self._observed.clear()
        self._ended.clear()

    def _let_go_of_ended(self, lost: Collection[int]) -> None:
        """Close the memory of groups that are over, to make room for one more."""
        kept = []
        for index, observer in enumerate(self._observed):
            has_lost = any(pid in lost for pid in observer.group_info.pids)
            if index > len(self._observed) - MAX_OBSERVED and not has_lost and not _is_over(observer):
                kept.append(observer)
                continue
            log = _read(observer)
            if log is not None:
                self._ended.append(log)
            observer.close()
        self._observed = kept


def _is_over(observer: Observer) -> bool:
    """Return whether nothing will be added to the group's memory, or it cannot be read."""
    try:
        return observer.is_over()
    except (ValueError, OSError):
        return True


def _read(observer: Observer) -> GroupLog | None:
    """Return the group's log; None if a rank has written over what describes the memory."""
    try:
        return observer.read()
    except (ValueError, OSError):
        return None
