"""The ranks' files on their way to the host that writes the report: as text, for a message."""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from phalanx.diagnostics.step_file import FILE_BYTES, read_rank_file
from phalanx.report.job_record import RANKS

_NAME = re.compile(r"[\w.-]{1,200}\.steps")


def pack_files(folder: str) -> Iterator[tuple[str, str]]:
    """Names and contents of the ranks' files in a report's folder; most of each is zeros, so it is short."""
    for path in sorted(Path(folder, RANKS).glob("*.steps")):
        try:
            yield path.name, base64.b64encode(zlib.compress(path.read_bytes(), 6)).decode()
        except OSError:
            continue


def unpack_file(folder: str, name: str, text: str) -> None:
    """Write one of them here, unless it lies there already: hosts may share their files.

    Raises:
        ValueError: it is none.
        OSError: it cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a rank's file")
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), FILE_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if read_rank_file(data) is None:
        raise ValueError("no rank has written it")
    path = os.path.join(folder, RANKS, name)
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.write(data)
