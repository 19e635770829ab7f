"""The fenced blocks of a document, and what a comment of HTML above one says of it.

<!-- not run: why -->        the reader cannot run it as it stands, or a test that is named runs it
<!-- exit code 1 -->         its last command ends so
<!-- varies: 84 %, 7 of -->  numbers in these words differ from run to run; with an exit code, a semicolon in between
<!-- with: torch_loop -->    a piece of Python that needs the names of this prelude (tests/documents/preludes.py)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_IN = ("python", "console", "bash", "diff")  # languages of what a reader types or runs


@dataclass(frozen=True)
class Block:
    """A block, with the words behind its language, and the comment above it."""

    document: Path
    line: int
    language: str
    words: str
    code: str
    comment: str

    @property
    def title(self) -> str:
        """The name of the file that the block is, or nothing."""
        found = re.search(r'title="([^"]+)"', self.words)
        return found[1] if found else ""

    @property
    def why_not(self) -> str:
        """The reason for which it is not run, or nothing."""
        return self.comment.removeprefix("not run:").strip() if self.comment.startswith("not run:") else ""

    @property
    def exit_code(self) -> int:
        found = re.search(r"\bexit code (\d+)", self.comment)
        return int(found[1]) if found else 0

    @property
    def varies(self) -> list[str]:
        """The words of its output whose numbers differ from run to run."""
        found = re.search(r"\bvaries: ([^;]+)", self.comment)
        return found[1].split(", ") if found else []

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    pattern = r"(?:^<!-- ([^\n]*?) -->\n)?^```([\w-]*)([^\n]*)\n(.*?)^```$"
    for match in re.finditer(pattern, text, re.M | re.S):
        comment, language, words, code = match.groups()
        yield Block(document, text.count("\n", 0, match.start()) + 1, language, words.strip(), code, comment or "")


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console's block, with the lines that it is said to print."""
    command, shown = "", list[str]()
    for line in block.code.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip():
            shown.append(line)
    if command:
        yield command, shown


# What no two runs have alike: times, rates and numbers of processes. All else is compared to the digit.
NUMBER = r"\d[\d.,]*"
FREE = rf"{NUMBER}(?= ?(?:s|ms|µs|min|seconds?|minutes?|[a-z]+/s)\b)|(?<=\bpid ){NUMBER}"


def as_pattern(line: str, varies: Collection[str] = ()) -> re.Pattern[str]:
    """Return what an output line may look like, with anything for an ellipsis, and other free numbers."""
    free = "|".join(["…", *map(re.escape, varies), FREE])
    pieces = re.split(f"({free})", line.rstrip())
    pieces[1::2] = [
        ".*" if piece == "…" else NUMBER.join(map(re.escape, re.split(NUMBER, piece))) for piece in pieces[1::2]
    ]
    pieces[::2] = map(re.escape, pieces[::2])
    return re.compile("".join(pieces))
