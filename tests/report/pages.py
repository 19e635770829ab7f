"""What every page must be: whole, on its own, without a script that is not ours."""

from __future__ import annotations

from html.parser import HTMLParser

from phalanx._job.report.page import SCRIPT

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """A page as its elements say: what is wrong with them, the words that a reader sees, cells by table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.sections: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self._open]
        if not text.startswith("<!DOCTYPE html>"):
            self.problems.append("no doctype")

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data") or (name == "style" and "url(" in (value or "")):
                self.problems.append(f"<{tag} {name}={value}> leads elsewhere")
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.sections.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass  # a shape of SVG

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        if "script" in self._open:
            if data != SCRIPT:
                self.problems.append("a script that is not ours")
            return
        self.words.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if self._open and self._open[-1] == "h2":
            self.sections[-1] += data
