"""Plan how a large tensor is cut into segments, and which segment does what in which tick. The plan is pure."""

from __future__ import annotations

from dataclasses import dataclass

# Each segment costs two syncs in memory and, per step, a message on each rail, which costs the processors more than a
# smaller one overlaps: four segments are enough, unless they would be very large.
_WANTED = 4
_LEAST_BYTES, _MOST_BYTES = 2**21, 2**23
_LEAST_MESSAGE_BYTES = 2**18  # of many hosts: each segment is cut again, one part for each
# Segments under way at once: as long as the link is busy with them, nobody has to be on time.
_UNDER_WAY = 6


@dataclass(frozen=True)
class Ticks:
    """All ranks take the same ticks in the same order, those without a rail too, so that no waits form a circle.

        tick 0   post the receives of segments 0 to `depth`; reduce segment 0 in memory, start its first step
        tick 1   post those of the next one; the same with segment 1
        ...      every segment that has had `per_step` ticks to travel begins its next step
        tick d   segment 0 has done all its steps: it is gathered in memory while the others travel    (d = `depth`)

    Receives are posted so early because a sender needs to hear of them first, behind all that travels the other way.
    """

    num_segments: int
    num_steps: int

    @classmethod
    def of(cls, nbytes: int, num_steps: int, num_messages: int = 1) -> Ticks:
        """Return the ticks for a tensor of `nbytes` on this host, so many steps between the hosts, and a segment that
        travels in so many messages, one after the other or to as many hosts.
        """
        least = max(_LEAST_BYTES, _LEAST_MESSAGE_BYTES * num_messages)
        size = min(max(-(-nbytes // _WANTED), least), max(_MOST_BYTES, 2 * least))
        return cls(max(1, -(-nbytes // size)), num_steps)

    def bounds(self, length: int) -> list[int]:
        """Return where the segments of `length` elements begin, and `length` at the end.

        The first and the last are half as long as the others: nothing travels while they are added up and gathered.
        """
        n = self.num_segments
        return [0, *(length * (2 * i - 1) // (2 * n - 2) for i in range(1, n)), length]

    @property
    def per_step(self) -> int:
        """Return the number of ticks from a step's start to its end."""
        return max(1, _UNDER_WAY // max(1, self.num_steps))

    @property
    def depth(self) -> int:
        """Return the number of ticks from a segment's start to its end."""
        return self.num_steps * self.per_step

    @property
    def count(self) -> int:
        return self.num_segments + self.depth

    def opened(self, tick: int) -> int:
        """Return how many segments' receives are posted by the time that `tick`'s segment starts."""
        return min(self.num_segments, tick + self.depth + 1)

    def stepping(self, tick: int) -> list[int]:
        """Return the segments that begin a step (or end their last) in `tick`, newest first: the link works at once."""
        newest, oldest = min(tick, self.num_segments - 1), max(0, tick - self.depth)
        return [s for s in range(newest, oldest - 1, -1) if (tick - s) % self.per_step == 0]

    def finishing(self, tick: int) -> int | None:
        """Return the segment that ends in `tick`, if one does."""
        return tick - self.depth if tick >= self.depth else None
