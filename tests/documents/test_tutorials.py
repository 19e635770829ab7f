"""Each tutorial is followed as its reader would: its files are written, its commands typed, what they print compared.

Numbers may be others, and an ellipsis stands for anything. On a page, commands run in one folder, in their order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig

import pytest
from tests.documents.blocks import ROOT, as_pattern, blocks, commands
from tests.documents.followed import PAGES

PAGES += [
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in (
        "a-rank-dies", "cuda-without-a-gpu", "from-accelerate", "from-lightning", "from-tf-distribute",
        "from-torchgpipe", "from-torchrun", "loggers", "when-it-hangs",
    )
]  # fmt: skip


@pytest.mark.timeout(600)  # a page starts Python and PyTorch some ten times
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow
def test_its_commands_print_what_the_page_shows(page, tmp_path):
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        if block.language != "console" or block.why_not:
            continue
        code = re.match(r"exit code (\d+)$", block.comment)
        for command, shown in commands(block):
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
            )
            said = done.stdout + done.stderr
            assert done.returncode == (int(code[1]) if code else 0), f"{block}: {command}\n{said}"
            for line in shown:
                pattern = as_pattern(line)
                matched = any(pattern.fullmatch(one.rstrip()) for one in said.splitlines())
                matched |= "torchrun" in command and bool(pattern.search(said))  # whose ranks share lines
                assert matched or line == "…", f"{block}: {command} did not print {line!r}, but:\n{said}"


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
    return {**kept, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
