"""An extension of griffe: the sections that Phalanx's docstrings have beside Google's stand in bold, a paragraph each.

In a docstring they are lines, `Shape: any, contiguous.`; in Markdown lines that follow each other are one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Shape|Cost|Memory|Numerics|Steps|Order|Source|What to do|Cost per [a-z]+): ", re.M)


class Sections(griffe.Extension):
    """Sets the sections apart in every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring in place."""
        if obj.docstring:
            obj.docstring.value = _SECTION.sub(r"\n**\1:** ", obj.docstring.value)
