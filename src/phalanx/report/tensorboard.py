"""Write scalars in TensorBoard's file format without TensorBoard, whose import would cost the launcher a second.

    file    records, each    length (8 bytes) | CRC of it (4) | event | CRC of that (4)
    event   protocol buffer  1: wall time (double)  2: step (varint)  3: file version (the first)  5: summary
    summary                  1: value, of 1: tag (string)  2: simple value (float)

Source: tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto; CRC-32C (Castagnoli), masked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator

from phalanx.report.measurements import Measurements


def plan_scalars(run: Measurements) -> Iterator[tuple[str, int, float, float]]:
    """Yield tag, step, value and wall time of each point of the run's curves and its ranks'."""
    last = max(1.0, run.loss[-1][0]) if run.loss else 1.0
    for step, loss in run.loss:
        yield "train/loss", int(step), loss, run.begun_unix + run.duration_s * step / last
    unit = "samples" if run.has_samples else "steps"
    for i, (at, value) in enumerate(run.throughput):
        yield f"throughput/{unit}_per_s", i, value, run.begun_unix + at
    for rank in run.last_attempt:
        for i, (at, value) in enumerate(rank.step_curve):
            yield f"step_ms/rank_{rank.rank}", i, 1e3 * value, run.begun_unix + at
        for i, (at, value) in enumerate(rank.memory_curve):
            yield f"memory_mib/rank_{rank.rank}", i, value / 2**20, run.begun_unix + at
        for part, seconds in rank.parts.items():
            yield f"step_parts_ms/{part}", rank.rank, 1e3 * seconds, run.begun_unix + run.duration_s


def encode(scalars: Iterable[tuple[str, int, float, float]], begun_unix: float) -> bytes:
    """Return the file's bytes."""
    data = _record(_field(1, struct.pack("<d", begun_unix)) + _field(3, b"brain.Event:2"))
    for tag, step, value, wall in scalars:
        point = _field(1, _field(1, tag.encode()) + _field(2, _float32(value)))
        data += _record(_field(1, struct.pack("<d", wall)) + _field(2, step) + _field(5, point))
    return data


def file_name(begun_unix: float) -> str:
    """Return a name for the file, with `tfevents` in it, which TensorBoard looks for."""
    return f"events.out.tfevents.{int(begun_unix)}.phalanx"


def _field(number: int, value: bytes | int) -> bytes:
    """Return a field of a protocol buffer: a double of eight bytes, a float of four, a varint, or what has a length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if number == 1 and len(value) == 8:
        return _varint(number << 3 | 1) + value
    if number == 2 and len(value) == 4:
        return _varint(number << 3 | 5) + value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float32(value: float) -> bytes:
    """Return `value` as a float32; one that is too large for it becomes infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked_crc(length) + event + _masked_crc(event)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _make_table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _make_table()
