"""A hook of mkdocs: the copy button of a console block copies the commands, without prompts and output.

The theme copies the attribute `data-copy` of an element around the block, where there is one.
"""

from __future__ import annotations

import collections
import html
import re
from typing import Any

_PROMPT = re.compile(r"^(?:[\w-]+)?\$ (?=\S)")  # "$ ", or with a host before it: "node-a$ "
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?([A-Za-z_]\w*)['\"]?")
# What may have a quotation mark that opens nothing: an escape, a whole quotation, a comment.
_CLOSED = re.compile(r"""\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(?:^|(?<=\s))#[^\n]*""", re.S)
_BLOCK = re.compile(r'<div class="(?:language-\w+ )?highlight">(.*?)</div>', re.S)


def commands(block: str) -> str:
    """Return what a reader types of a console block; nothing if the block has no prompt.

    A command continues after a backslash, in an open quotation, in a here-document, and after the shell's second
    prompt.
    """
    lines = collections.deque(block.splitlines())
    typed = list[str]()
    while lines:
        line = lines.popleft()
        if prompt := _PROMPT.match(line):
            command = line[prompt.end() :]
            more = "> " if lines and lines[0].startswith("> ") else ""
            while lines and ((more and lines[0].startswith(more)) or _is_open(command)):
                command += "\n" + lines.popleft().removeprefix(more)
            typed.append(command)
    return "\n".join(typed)


def _is_open(command: str) -> bool:
    """Say whether the shell would wait for another line."""
    for here in _HERE_DOCUMENT.finditer(command):
        body = re.search(rf"\n(?:.*\n)?\t*{here[1]}$", command[here.end() :], re.S | re.M)
        if body is None:
            return True
        command = command[: here.end() + body.start()] + command[here.end() + body.end() :]
    return command.endswith("\\") or bool(re.search(r"['\"]", _CLOSED.sub("", command)))


def on_page_content(content: str, /, **_: Any) -> str:
    """Give each block with a prompt the attribute that the copy button reads."""

    def replace(match: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]+>", "", match[1]))
        if typed := commands(text):
            return match[0].replace("<div ", f'<div data-copy="{html.escape(typed)}" ', 1)
        return match[0]

    return _BLOCK.sub(replace, content)
