"""Each of these pages is followed as its reader would: files are written, commands typed, and their output compared.

Numbers are compared to the digit, but for times and the like. An ellipsis stands for anything; a page without one shows
all that its commands print. It always shows each warning. On a page, commands run in one folder, in their order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

import pytest
from tests.documents.blocks import as_pattern, blocks, commands
from tests.documents.followed import PAGES
from tests.documents.typed import run


def matching(output: str, line: str, varies: Collection[str]) -> list[str]:
    pattern = as_pattern(line, varies)
    return [one for one in output.splitlines() if pattern.fullmatch(one.rstrip())]


def of_each_rank(line: str) -> list[str]:
    """Return what stands for "[0-1] done" where the ranks print it more than a moment apart: "[0] done", "[1] done"."""
    label = re.match(r"\[(\d+)-(\d+)\] ", line)
    ranks = range(int(label[1]), int(label[2]) + 1) if label else ()
    return [f"[{rank}] {line[label.end() :]}" for rank in ranks] if label else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow
def test_its_commands_print_what_the_page_shows(page, tmp_path):
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        if block.language != "console" or block.why_not:
            continue
        for command, shown in commands(block):
            done = run(["bash", "-c", command], tmp_path)
            assert done.code == block.exit_code, f"{block}: {command}\n{done.output}"
            matches = []
            for line in shown:
                if line == "…":
                    continue
                lines = matching(done.output, line, block.varies)
                apart = [matching(done.output, one, block.varies) for one in of_each_rank(line)]
                if apart and all(apart):
                    lines += itertools.chain.from_iterable(apart)
                if "torchrun" in command:  # whose ranks share lines
                    pattern = as_pattern(line, block.varies)
                    lines += [one for one in done.output.splitlines() if pattern.search(one)]
                assert lines, f"{block}: {command} did not print {line!r}, but:\n{done.output}"
                matches += lines
            others = [one for one in done.output.splitlines() if one.strip() and one not in matches]
            assert others == [] or "…" in shown, f"{block}: {command} also printed {others}"
            assert done.unshown(matches) == [], f"{block}: {command} warns, and the page does not show it"
