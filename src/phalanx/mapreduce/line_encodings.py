"""Say whether the lines of an encoding can be cut out of a file, and each decoded without the others."""

from __future__ import annotations

_LETTERS = "a~+é\u05d0\u0627\u0416\u0e01\u3042\u4e2d\uac00"  # most encodings of more than a byte have one of them


def require_line_encoding(encoding: str) -> None:
    """Return if the byte 0x0A ends every line of `encoding`, is nowhere else, and leaves no state for the next line.

    Raises:
        ValueError: it does not (UTF-16, EBCDIC, ISO-2022-KR), or Python knows no such encoding of text.
    """
    try:
        is_cut = _ends_lines_by_one_byte(encoding)
    except LookupError:
        raise ValueError(f"map_reduce: Python knows no encoding {encoding!r} of text") from None
    if not is_cut:
        raise ValueError(
            f"map_reduce: lines of {encoding} cannot be found by a byte and decoded one by one. Use encoding=None and "
            "decode in map, or convert the files."
        )


def _ends_lines_by_one_byte(encoding: str) -> bool:
    try:
        if "\n".encode(encoding) != b"\n":
            return False
    except UnicodeError:
        return False
    for letter in _LETTERS:
        try:
            twice = f"{letter}\n{letter}\n".encode(encoding)
        except UnicodeError:  # it has no such letter
            continue
        lines = twice.split(b"\n")
        if len(lines) != 3 or lines[0] != lines[1] or lines[2]:  # a header, say, that only the first line has
            return False
    return all(_keeps_end(bytes([byte, 0x0A]), encoding) for byte in range(256))


def _keeps_end(line: bytes, encoding: str) -> bool:
    """Return whether the end of a line is one, whatever stands before it: in HZ a tilde takes it away."""
    try:
        return line.decode(encoding).endswith("\n")
    except UnicodeError:
        return True
