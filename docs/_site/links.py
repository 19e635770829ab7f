"""A hook of mkdocs: what works in the repository's pages is made to work on the site.

Links that lead out of the documentation, to the repository's files, lead to the forge. In the repository such a link is
a path (`../../examples/digits.py`), so that it works there and tests can follow it. A fence loses the name by which a
test finds its block, which the site's parser does not know.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

_logger = logging.getLogger("mkdocs.hooks.links")
_FENCE = re.compile(r"^```(\w+) [\w:-]+$", re.M)  # ```python accelerate: the name by which a test finds the block
_LINK = re.compile(r"\]\((\.\.?/[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with addresses of the forge in the place of paths outside of the documentation."""
    docs = Path(config.docs_dir)
    root = docs.parent
    folder = docs / os.path.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[1]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():  # a warning ends a strict build
            _logger.warning(f"{page.file.src_uri} links to {match[1]}, which is not there")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{target.relative_to(root).as_posix()}{match[2] or ''})"

    return _FENCE.sub(r"```\1", _LINK.sub(replace, markdown))
