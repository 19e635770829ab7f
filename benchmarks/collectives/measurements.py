"""What was measured: samples by contestant and case, and who was absent, failed, or has no such operation."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from cases import OPS, Case
from harness import Summary, summarise
from peers import MEMORY, PHALANX

GLOO = "gloo"


@dataclass
class Measurements:
    """All samples of one command, one per round, in seconds per call."""

    rounds: int
    samples: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_offered: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, peer: str, case: Case, seconds: float) -> None:
        """Keep one round's result."""
        self.samples.setdefault((peer, case), []).append(seconds)

    def fail(self, peer: str, world_size: int, error: Exception) -> None:
        """Record that `peer` is out for this world size, and say so at once."""
        # The first line is the fact; below it is the ranks' output, with paths that a results file should not hold.
        self.failed[f"{peer}, {world_size} ranks"] = str(error).partition("\n")[0]
        print(f"\n{error}", file=sys.stderr, flush=True)

    def cases(self) -> list[Case]:
        """Every case that some contestant ran, in the order of measuring."""
        return list(dict.fromkeys(case for _, case in self.samples if case.op in OPS))

    def names(self) -> list[str]:
        """Every contestant that has a result, the memory aside."""
        return list(dict.fromkeys(name for name, _ in self.samples if name != MEMORY.name))

    def summary(self, peer: str, case: Case) -> Summary | None:
        """The rounds of one contestant and case, or None when there is none."""
        samples = self.samples.get((peer, case))
        return summarise(samples) if samples else None

    def best_peer(self, case: Case) -> tuple[str, float] | None:
        """The fastest contestant that is not Phalanx, and its median seconds."""
        others = [name for name in self.names() if not name.startswith(PHALANX)]
        medians = [(summary.median, name) for name in others if (summary := self.summary(name, case))]
        if not medians:
            return None
        seconds, name = min(medians)
        return name, seconds

    def floor_seconds(self, case: Case) -> float | None:
        """The time in which every rank at once copies, or updates in place, a buffer of this case's size."""
        summary = self.summary(MEMORY.name, case.floor)
        return summary.median if summary else None

    def memory_bandwidth(self, world_size: int) -> float | None:
        """Bytes per second, read plus written, all ranks at once: the best that was seen at the largest size."""
        cases = [case for name, case in self.samples if name == MEMORY.name and case.world_size == world_size]
        largest = max((case.num_bytes for case in cases), default=0)
        speeds = [
            case.least_traffic / summary.median
            for case in cases
            if case.num_bytes == largest and (summary := self.summary(MEMORY.name, case))
        ]
        return max(speeds, default=None)

    def as_json(self) -> dict[str, object]:
        """All of it, seconds throughout."""
        results = []
        for (peer, case), samples in self.samples.items():
            summary = summarise(samples)
            results.append(
                {
                    "world_size": case.world_size,
                    "op": case.op,
                    "num_bytes": case.num_bytes,
                    "peer": peer,
                    "median_s": summary.median,
                    "low_s": summary.low,
                    "high_s": summary.high,
                    "samples_s": samples,
                }
            )
        world_sizes = dict.fromkeys(case.world_size for _, case in self.samples)
        return {
            "rounds": self.rounds,
            "memory_bandwidth_bytes_per_s": {str(size): self.memory_bandwidth(size) for size in world_sizes},
            "absent": self.absent,
            "failed": self.failed,
            "not_offered": self.not_offered,
            "results": results,
        }
