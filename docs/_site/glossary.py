"""A hook of mkdocs: the first use of a glossary's term on a page leads to the glossary."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

GLOSSARY = "reference/glossary.md"
# Where a term might be an ordinary word, it is not linked.
_ORDINARY = {"attempt", "engine", "member", "phase", "position", "poison", "slot", "shadow", "stage", "sync"}
_ORDINARY |= {"schedule"}
# What is not running text: code blocks, inline code, links, images, tags, headings, and the opening paragraph.
_NOT_TEXT = re.compile(
    r"^```.*?^```[^\n]*$|^(?: {4}|#|:::).*?$|\A#[^\n]*\n\n.*?\n\n|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|<[^>\n]*>",
    re.M | re.S,
)


@functools.cache
def terms(glossary: Path) -> dict[str, str]:
    """Return each term that is linked, in lower case, with its anchor."""
    headings = re.findall(r"^### (.+)$", glossary.read_text(encoding="utf-8"), re.M)
    return {
        heading.lower(): re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
        if heading.lower() not in _ORDINARY
    }


def link_terms(markdown: str, known: dict[str, str], glossary: str) -> str:
    """Return the page with a link at the first use of each term, `glossary` being the way there."""
    if not known:
        return markdown
    left = dict(known)
    pattern = re.compile(rf"\b({'|'.join(sorted(map(re.escape, known), key=len, reverse=True))})(s?)\b", re.I)

    def replace(match: re.Match[str]) -> str:
        anchor = left.pop(match[1].lower(), None)
        return f"[{match[0]}]({glossary}#{anchor})" if anchor else match[0]

    pieces, end = [], 0
    for other in _NOT_TEXT.finditer(markdown):
        pieces += [pattern.sub(replace, markdown[end : other.start()]), other[0]]
        end = other.end()
    return "".join([*pieces, pattern.sub(replace, markdown[end:])])


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Link the terms of every page but the glossary's own and the indexes."""
    place = page.file.src_uri
    if place == GLOSSARY or place.endswith("index.md"):
        return markdown
    known = terms(Path(config.docs_dir) / GLOSSARY)
    return link_terms(markdown, known, posixpath.relpath(GLOSSARY, posixpath.dirname(place)))
