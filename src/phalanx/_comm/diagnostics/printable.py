"""Make foreign text (names of scripts and hosts, reasons) safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` on one line, with control characters escaped, such as "\\x1b" for ESC."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """Return `text` with its tabs expanded, and each line escaped as by `printable`."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))
