"""Point to point: one lane per peer and direction, so that a send that waits never holds up a receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from phalanx.backend.arguments import check_rank, one
from phalanx.backend.process_group.identity import Identity
from phalanx.backend.work import Lane, PhalanxWork

_ANYBODY = -1


class Messages(Identity):
    """send, recv and recv from anybody. Messages between two ranks arrive in order per tag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channels: dict[tuple[str, int], Lane] = {}

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Over when the tensor may be changed again; the receiver may not have it yet."""
        tensor = one(tensors, "send")
        self._check_peer(dst, "send", "dst")
        span = self._span(None, 3)
        return self._queue(self._channel("send", dst), lambda: self._memory.send(tensor, dst, tag, span), [tensor])

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        """Over when the tensor holds the message."""
        tensor = one(tensors, "recv")
        self._check_peer(src, "recv", "src")
        return self._receive(tensor, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """As `recv`, from whoever sends first; `source_rank()` of the work says who."""
        return self._receive(one(tensors, "recv"), _ANYBODY, tag)

    def _receive(self, tensor: Tensor, src: int, tag: int) -> dist.Work:
        span = self._span(None, 4)
        work = PhalanxWork([tensor])
        self._recent.append(work)

        def action() -> None:
            work._source = self._memory.recv(tensor, src, tag, span)

        return self._channel("recv", src).put(action, work)

    def _check_peer(self, peer: int, operation: str, name: str) -> None:
        check_rank(peer, self._size, operation, name)
        if peer == self._rank:
            raise ValueError(f"{operation}: {name} is {peer}, which is this rank itself")

    def _channel(self, direction: str, peer: int) -> Lane:
        # Receives from anybody look into every channel, so then all receives share one lane.
        if direction == "recv" and (peer == _ANYBODY or ("recv", _ANYBODY) in self._channels):
            for key, lane in list(self._channels.items()):
                if key[0] == "recv" and key[1] != _ANYBODY:
                    lane.close(self._timeout_s)
                    del self._channels[key]
            peer = _ANYBODY
        if (direction, peer) not in self._channels:
            name = f"phalanx-{self._name}-{direction}-{'any' if peer < 0 else peer}"
            self._channels[direction, peer] = Lane(name)
        return self._channels[direction, peer]

    def _lanes(self) -> list[Lane]:
        return [*super()._lanes(), *self._channels.values()]
