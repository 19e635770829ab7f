"""Values that one rank holds and others get."""

from __future__ import annotations

from typing import Any

import torch

MIB = 1 << 18  # float32 values


class Held:
    """A part that is whatever it was given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get_contents(self) -> Any:
        return self.value

    def load_contents(self, value: Any) -> None:
        self.value = value


def value_of(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    large = torch.randn(5 * MIB + 3, generator=draw)
    return {
        "huge": large,  # two huge pages and more, which are asked for where it is new
        "turned": torch.randn(600, 700, generator=draw).t(),
        "every second": torch.randn(2 * MIB, generator=draw)[::2],
        "small": [torch.randn(7, generator=draw), torch.tensor(float(seed)), torch.empty(0)],
        "bytes": torch.randint(0, 255, (70_001,), generator=draw, dtype=torch.uint8),
        "number": seed,
    }
