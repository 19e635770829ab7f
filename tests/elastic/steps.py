"""Which samples each step of a job used."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.elastic.jobs import Job


def samples_of_steps(folder: Path) -> dict[int, list[int]]:
    """What each step used the last time that it was done, by all ranks."""
    of_generation: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("samples-*"):
        for line in path.read_text().splitlines():
            generation, step, _, _, samples = line.split()
            of_generation[int(step)][int(generation)] += map(int, samples.split(","))
    return {step: sorted(by[max(by)]) for step, by in of_generation.items()}


PLAIN = Job("", batch_of="global", draws=False, layer_norm=True)
