"""Select the streams of ranks that are written to files: the values of --redirects and --tee."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Streams:
    """`Streams` selects streams of local ranks: 1 is stdout, 2 stderr, 3 both."""

    all: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        return dict(self.by_rank).get(local_rank, self.all)


NO_STREAMS = Streams()
