"""Encode and write the agent's output, without raising, whatever the text and the descriptor are."""

from __future__ import annotations

import os


def encode(text: str, encoding: str = "utf-8") -> bytes:
    """Return `text` as bytes; characters that `encoding` lacks (surrogates, raw bytes) are escaped, as in `\\udc80`."""
    return text.encode(encoding, "backslashreplace")


def show(fd: int, text: str, encoding: str = "utf-8") -> bool:
    """Write all of `text` and a line end to `fd`; return False if this fails (closed, full)."""
    data = encode(text, encoding) + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True
