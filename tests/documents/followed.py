"""The tutorials whose commands are typed."""

from __future__ import annotations

from tests.documents.blocks import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
