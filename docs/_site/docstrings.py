"""An extension of griffe: the sections that Phalanx's docstrings have beside Google's stand in bold, a paragraph each.

In a docstring they are lines, `Shape: any, contiguous.`; in Markdown lines that follow each other are one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Shape|Cost|Memory|Numerics|Steps|Order|Source|What to do|Cost per [a-z]+): ", re.M)
_TOGETHER = re.compile(r"^( {4,})((?:\w+, )+\w+): ", re.M)


class Sections(griffe.Extension):
    """Sets the sections apart in every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring in place."""
        if obj.docstring:
            text = _SECTION.sub(r"\n**\1:** ", obj.docstring.value)
            obj.docstring.value = _TOGETHER.sub(_apart, text)


def _apart(match: re.Match[str]) -> str:
    """Give each of several parameters that share a text an entry of its own; the last one keeps the text."""
    indent, *names = match[1], *match[2].split(", ")
    return "".join(f"{indent}{name}: see `{names[-1]}`.\n" for name in names[:-1]) + f"{indent}{names[-1]}: "
