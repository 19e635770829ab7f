r"""Read the records of a split: whole lines of a file, in blocks, or items of a sequence.

    bytes     | abc\ndef | g\nhi\n | jk |
    split       0          1         2        a line belongs to the split of its first byte
    lines       abc defg   hi        jk

A line ends with "\n" or "\r\n", which is not part of the record. The last line of a file may lack it.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from phalanx.mapreduce.splits import FileSplit, Indexable, Piece, Split

_SEQUENCE_BLOCK = 64
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass
class RecordBlock:
    """A `RecordBlock` is a block of consecutive records.

    `fetch`, if given, returns the record for an item; otherwise items are records. `bad` lists the records that cannot
    be decoded, which are not in `items`.
    """

    items: list[Any]
    locate: Callable[[int], str]
    num_bytes: int = 0
    fetch: Callable[[Any], Any] | None = None
    bad: list[tuple[str, Any, Exception]] = field(default_factory=list)


def read_blocks(
    split: Split, sequence: Indexable[Any] | None, encoding: str | None, block_bytes: int
) -> Iterator[RecordBlock]:
    """Yield all records of `split`, block by block. The blocks do not depend on the rank or on time.

    Raises:
        OSError: a file cannot be read.
    """
    if isinstance(split, FileSplit):
        for piece in split.pieces:
            for offset, data in read_lines(piece, block_bytes):
                yield _decode(piece.path, offset, data, encoding)
        return
    assert sequence is not None
    for start in range(split.start, split.stop, _SEQUENCE_BLOCK):
        positions = list(range(start, min(start + _SEQUENCE_BLOCK, split.stop)))
        yield RecordBlock(positions, lambda index, at=start: f"record {at + index}", fetch=sequence.__getitem__)  # type: ignore[misc]


def read_lines(piece: Piece, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in `piece`, in blocks of whole lines, each with its offset.

    Memory: one block, or the longest line if that is longer.
    """
    with _open(piece) as file:
        if piece.stop is None:
            start, stop = 0, 1 << 62
        else:
            stop = piece.stop
            start = _first_line(file, piece.start, stop, block_bytes)
            if start >= stop:
                return
            file.seek(start)
        pending: list[bytes] = []
        at = start  # the offset of the next read
        while data := file.read(block_bytes):
            begin, at = at, at + len(data)
            if at >= stop and (end := data.find(b"\n", max(stop - 1 - begin, 0))) >= 0:
                yield start, b"".join([*pending, data[: end + 1]])
                return
            cut = data.rfind(b"\n") + 1
            if cut:
                yield start, b"".join([*pending, data[:cut]])
                pending, start = [data[cut:]] if cut < len(data) else [], begin + cut
            else:
                pending.append(data)
        if pending:
            yield start, b"".join(pending)


def _open(piece: Piece) -> IO[bytes]:
    if piece.stop is None:
        opened: IO[bytes] = _OPEN[Path(piece.path).suffix](piece.path, "rb")
        return opened
    return open(piece.path, "rb", buffering=0)


def _first_line(file: IO[bytes], start: int, stop: int, block_bytes: int) -> int:
    """Return the offset of the first line that begins at `start` or later; at least `stop` if none begins before it."""
    if start == 0:
        return 0
    at = start - 1  # a line begins at `start` if the previous line ends just before it
    file.seek(at)
    while at < stop and (data := file.read(block_bytes)):
        if (end := data.find(b"\n")) >= 0:
            return at + end + 1
        at += len(data)
    return stop


def _decode(path: str, offset: int, data: bytes, encoding: str | None) -> RecordBlock:
    def locate(index: int) -> str:
        return f"{path}, byte {offset + _length_of_lines(data, index)}"

    if encoding is None:
        return RecordBlock(_split_bytes(data), locate, len(data))
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return _decode_by_line(path, offset, data, encoding)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:  # a block ends with a line end, except perhaps the last one of a file
        lines.pop()
    return RecordBlock(lines, locate, len(data))


def _decode_by_line(path: str, offset: int, data: bytes, encoding: str) -> RecordBlock:
    items: list[str] = []
    offsets: list[int] = []
    block = RecordBlock(items, lambda index: f"{path}, byte {offsets[index]}", len(data))
    for line in _split_bytes(data, keep_ends=True):
        try:
            items.append(_without_end(line).decode(encoding))
            offsets.append(offset)
        except UnicodeDecodeError as error:
            block.bad.append((f"{path}, byte {offset}", _without_end(line), error))
        offset += len(line)
    return block


def _split_bytes(data: bytes, *, keep_ends: bool = False) -> list[bytes]:
    lines = data.split(b"\n")  # not splitlines(), for which "\r" alone ends a line
    last = lines.pop()
    whole = [line + b"\n" for line in lines] if keep_ends else [_without_end(line + b"\n") for line in lines]
    return [*whole, last] if last else whole


def _without_end(line: bytes) -> bytes:
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line


def _length_of_lines(data: bytes, count: int) -> int:
    end = 0
    for _ in range(count):
        end = data.find(b"\n", end) + 1
    return end
