"""Format the prefix of a line, in colour on a terminal, and cut status lines to the terminal's width."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from string import Template

from phalanx._comm.diagnostics.rank_list import format_ranks

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red: readable on dark and light
_DIM = 2
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MAX_STATUS_LINES = 8

CLEAR_BELOW = b"\r\x1b[J"


def format_prefix(ranks: Iterable[int], *, colour: bool, host: str = "") -> bytes:
    """Return `[2] `; for several ranks `[0-3] `, which is dim instead of coloured; with a host `[2 node-b] `."""
    chosen = sorted(ranks)
    label = f"[{format_ranks(chosen)}{' ' if host else ''}{host}]"
    if colour:
        code = _COLOURS[chosen[0] % len(_COLOURS)] if len(chosen) == 1 else _DIM
        label = f"\x1b[{code}m{label}\x1b[0m"
    return label.encode() + b" "


def wants_colour(environ: Mapping[str, str], terminal: bool) -> bool:
    """Return whether to use colours: with FORCE_COLOR, or on a terminal unless NO_COLOR or TERM=dumb is set."""
    if environ.get("FORCE_COLOR"):
        return True
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def plan_status(states: Sequence[tuple[int, bytes]], *, columns: int, rows: int, colour: bool) -> list[bytes]:
    """Return the status lines to draw, one per distinct state, cut to the terminal's width.

    They fill at most half of the terminal's rows, and at most `MAX_STATUS_LINES`.
    """
    groups: dict[bytes, set[int]] = {}
    for rank, state in states:
        groups.setdefault(state, set()).add(rank)
    limit = max(1, min(MAX_STATUS_LINES, rows // 2))
    drawn = []
    for state, ranks in list(groups.items())[:limit]:
        width = columns - 1 - len(format_prefix(ranks, colour=False))
        reset = b"\x1b[0m" if b"\x1b" in state else b""
        drawn.append(format_prefix(ranks, colour=colour) + _cut(state, max(1, width)) + reset)
    return drawn


def _cut(state: bytes, columns: int) -> bytes:
    """Return `state` cut to `columns`; a colour code counts as no column, a wide character as two."""
    text = state.decode(errors="replace").expandtabs()
    kept, used, position = [], 0, 0
    while position < len(text):
        escape = _ESCAPE.match(text, position)
        if escape:
            kept.append(escape.group())
            position = escape.end()
            continue
        character = text[position]
        if unicodedata.combining(character) == 0:
            used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > columns:
            break
        kept.append(character)
        position += 1
    return "".join(kept).encode()


_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def find_template(given: str, environ: Mapping[str, str]) -> str:
    """Return the template of the command line, or of the environment; empty if neither has one."""
    return given or environ.get(_TEMPLATE_VARIABLE, "")


def fill_template(template: str, *, rank: int, local_rank: int, role: str, host: str) -> str:
    """Return the template with its variables replaced; other text is unchanged, as in torchrun."""
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)
