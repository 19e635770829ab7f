"""`LineForwarder` sends the lines of this host's ranks to the leader, or shows them here if this host leads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx._job.hosts.control_channel import ControlChannel, decode_lines, encode_lines
from phalanx._job.output.display import Display


class LineForwarder:
    """A `LineForwarder` sends the output lines of a follower's ranks to the leader, which prints them."""

    def __init__(self) -> None:
        self._channel: ControlChannel | None = None
        self._display: Display | None = None  # the display of this host, once it leads the job
        self.attempt = 0
        self._items: list[list[Any]] = []  # rank, stream, lines, status, whether the rank's output has ended
        self._shown: dict[tuple[int, int], bytes] = {}
        self._printed: set[str] = set()  # the messages that were already sent; each is sent only once

    def connect(self, channel: ControlChannel) -> None:
        self._channel = channel

    @property
    def full(self) -> bool:
        """Return whether so many bytes are unsent that the ranks' output should not be read for now."""
        if self._display is not None:
            return self._display.full
        return self._channel is not None and self._channel.full

    def lead(self, display: Display) -> None:
        """Show the lines on this host from now on, beginning with those not yet sent."""
        self._display = display
        sent = self._channel.pop_own_lines() if self._channel is not None else []
        for rank, stream, lines, status, ended in [*(item for body in sent for item in body["items"]), *self._items]:
            display.show(rank, stream, decode_lines(lines), decode_lines([status])[0])
            if ended:
                display.end(rank)
        self._items = []

    def begin(self, ranks: Sequence[int]) -> None:
        """Expect lines of these ranks, if this host leads; a leader on another host already expects them."""
        if self._display is not None:
            self._display.begin(ranks)

    def end(self, rank: int) -> None:
        """Report that a rank's output has ended."""
        if self._display is not None:
            self._display.end(rank)
            return
        self._items.append([rank, 1, [], "", True])

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        """Send lines, and the status line that follows them."""
        if self._display is not None:
            self._display.show(rank, stream, lines, status)
            return
        if lines or self._shown.get((rank, stream), b"") != status:
            self._shown[rank, stream] = status
            self._items.append([rank, stream, encode_lines(lines), encode_lines([status])[0], False])

    def print_once(self, what: str, text: str) -> None:
        if self._display is not None:
            self._display.print_once(what, text)
        elif self._channel is not None and what not in self._printed:
            self._printed.add(what)
            self._channel.put(self._channel.first, "print", attempt=self.attempt, text=text)

    def show_here(self, display: Display) -> None:
        """Show, on this host, the lines that the lost leader has not received."""
        self.flush()
        for message in self._channel.drain("lines") if self._channel is not None else ():
            for rank, stream, lines, _, _ in message["items"]:
                display.show(rank, stream, decode_lines(lines), b"")

    def flush(self) -> None:
        if self._display is not None:
            self._display.flush()
        elif self._items and self._channel is not None:
            items, self._items = self._items, []
            for item in items:  # together, they may exceed the limit of a message; the channel combines small messages
                self._channel.put(self._channel.first, "lines", attempt=self.attempt, items=[item])
