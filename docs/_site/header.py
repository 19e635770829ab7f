"""A hook of mkdocs: the header has the package's version, and the home page no sidebars."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

INIT = Path(__file__).parents[2] / "src" / "phalanx" / "__init__.py"


def on_config(config: Any) -> None:
    """Read the version where it is set, without importing the package, which needs PyTorch."""
    found = re.search(r'^__version__ = "(.+)"$', INIT.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ValueError(f"{INIT} sets no version")
    config.extra["package_version"] = found[1]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Hide the sidebars of the home page, whose two columns need the width."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
