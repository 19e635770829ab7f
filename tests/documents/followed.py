"""The pages whose commands are typed: the tutorials and the home page."""

from __future__ import annotations

from tests.documents.blocks import ROOT

PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "index.md"]
