"""`Pulled` holds the values that a trainer has pulled for one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Pulled(Mapping[str, Tensor]):
    """`Pulled` holds the values for one step by name; for a table, the rows of the requested ids, in the ids' shape.

    The values require gradients; `ParameterServer.push` sends them. `staleness` is how many steps the slowest trainer
    is behind.
    """

    staleness: int
    _values: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _dense: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
