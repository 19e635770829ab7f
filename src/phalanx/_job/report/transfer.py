"""Pack the ranks' files as text for a message to the host that writes the report, and unpack them there."""

from __future__ import annotations

import base64
import os
import re
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress

from phalanx._comm.diagnostics.step_file import FILE_BYTES, read_rank_file
from phalanx._job.report.job_record import RANKS
from phalanx._job.report.records import list_records, run_of

_NAME = re.compile(r"[\w.-]{1,200}\.steps")


_GOT = "got-"  # the prefix of files received from other hosts, which remove their own copies once these are sent


def pack_files(folder: str, run: str, since: float) -> Iterator[tuple[str, str]]:
    """Yield the name and the compressed contents of each file of `run` that a rank of this host has written.

    `since` is a time of the monotonic clock: older files belong to an earlier run, which may have had the same id.
    """
    for path, file in list_records(folder):
        if run_of(file) == run and file.facts.get("host") == socket.gethostname() and file.begun >= since:
            with suppress(OSError):
                yield path.name, base64.b64encode(zlib.compress(path.read_bytes(), 6)).decode()


def unpack_file(folder: str, name: str, text: str) -> None:
    """Write a received file on this host, under another name, and remove the original if hosts share the folder.

    Raises:
        ValueError: the name or the text is not that of a rank's file.
        OSError: the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a rank's file")
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), FILE_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if read_rank_file(data) is None:
        raise ValueError("the content is not a rank's file")
    ranks = os.path.join(folder, RANKS)
    os.makedirs(ranks, exist_ok=True)
    with open(os.path.join(ranks, _GOT + name), "wb") as file:
        file.write(data)
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(ranks, name))
