"""The pages whose commands are typed: the tutorials, the home page and guides."""

from __future__ import annotations

from tests.documents.blocks import ROOT

PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "index.md"]
PAGES += [
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in (
        "a-rank-dies", "cuda-without-a-gpu", "from-accelerate", "from-lightning", "from-tf-distribute",
        "from-torchgpipe", "from-torchrun", "loggers", "when-it-hangs", "whole-script",
    )
]  # fmt: skip
