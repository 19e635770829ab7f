"""Encode and write text on its way out of the agent, which never fails, whatever the text holds and where it goes."""

from __future__ import annotations

import os


def encode(text: str, encoding: str = "utf-8") -> bytes:
    """Return `text` as bytes; what `encoding` lacks (half a surrogate pair, raw bytes) becomes `\\udc80` or such."""
    return text.encode(encoding, "backslashreplace")


def show(fd: int, text: str, encoding: str = "utf-8") -> bool:
    """Write `text` and a line end to `fd`, all of it; return False if that can't be written (closed, full)."""
    data = encode(text, encoding) + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True
