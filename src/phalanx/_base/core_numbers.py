"""The numbers that Python shares with the C core, as the core defines them, and their names.

Where the core is not built (no compiler, no futex) only Python uses these numbers. Each is then the position of its
name in a list here, so that modules that use the numbers can be imported and run.
"""

from __future__ import annotations

from typing import Any


def _find_core() -> Any:
    try:
        from phalanx import _core
    except ImportError:
        return None
    return _core


def _read(*names: str) -> list[int]:
    core = _find_core()
    return [place if core is None else int(getattr(core, name)) for place, name in enumerate(names)]


# fmt: off
# Operations.
_KINDS = (
    "BARRIER", "BROADCAST", "ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "REDUCE_SCATTER", "ALL_TO_ALL",
    "SEND", "RECV", "GRADIENTS", "BROADCAST_BUFFERS",
)
(
    BARRIER, BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL,
    SEND, RECV, GRADIENTS, BROADCAST_BUFFERS,
) = _read(*_KINDS)
KIND_NAMES = dict(zip(_read(*_KINDS), map(str.lower, _KINDS), strict=True))

# Types of elements. The core's names are short; users know torch's.
_DTYPES = {
    "BYTES": "bytes", "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "C128": "complex128",
}
DTYPE_NAMES = dict(zip(_read(*_DTYPES), _DTYPES.values(), strict=True))
DTYPE_NUMBERS = {name: number for number, name in DTYPE_NAMES.items()}
BYTES = DTYPE_NUMBERS["bytes"]

# Reductions.
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = _read(*_REDUCTIONS)
REDUCTION_NAMES = dict(zip(_read(*_REDUCTIONS), _REDUCTIONS, strict=True))

# Outcomes of operations.
_STATUSES = (
    "OK", "MISMATCH", "PEER_LOST", "DEADLINE", "INTERRUPTED", "INVALID", "NO_MEMORY", "CLOSED",
)
OK, MISMATCH, PEER_LOST, DEADLINE, INTERRUPTED, INVALID, NO_MEMORY, CLOSED = _read(*_STATUSES)
STATUS_NAMES = dict(zip(_read(*_STATUSES), (name.lower().replace("_", " ") for name in _STATUSES), strict=True))

# Whether a rank has joined a group, and left it.
ABSENT, JOINED, LEFT = _read("ABSENT", "JOINED", "LEFT")
