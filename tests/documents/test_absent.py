"""A sentence that says that something is not there names it in a comment, and is wrong on the day on which it is there.

The page for readers of articles denied pipelines and strategies for months after they were built.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import click
import pytest
from tests.documents.blocks import documents

from phalanx._job.launch.options import OPTIONS
from phalanx.cli.commands import group

# Sentences that deny a feature. A comment `<!-- absent: NAME ... -->` on the same line names what is meant.
DENIALS = re.compile(
    r"Phalanx has (?:none|no )|none of its own"
    r"|[Tt]here (?:is|are) no [^.|]*\b(?:class|option|strategy|command|schedule)\b"
    r"|\| there is none\b|\b[Nn]ot there(?= *(?:\||:|<!--|$))",
    re.M,
)
# Lines that deny something else: not a feature of Phalanx that could be built one day.
OTHERS = (
    "There is no option that takes the key itself",  # and there will be none: security.md says why
)
MARK = re.compile(r"<!-- absent: (.+?) -->")


def denials():
    for document in documents():
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            if DENIALS.search(line) and not any(other in line for other in OTHERS):
                yield f"{document.name}:{number}", line


def marks():
    for document in documents():
        for names in MARK.findall(document.read_text(encoding="utf-8")):
            yield from names.split()


def exists(name: str) -> bool:
    """Whether `phalanx.a.B`, `phalanx.a.B(argument)`, `phalanx run --option` (as `run--option`) is there."""
    if match := re.fullmatch(r"([a-z]+)(--[a-z-]+)", name):
        return match[2] in options_of(match[1])
    path, _, argument = name.removesuffix(")").partition("(")
    found = find(path)
    if found is None or not argument:
        return found is not None
    return argument in inspect.signature(found).parameters


def options_of(command: str) -> set[str]:
    if command == "run":
        return {f"--{option.name}" for option in OPTIONS}
    found = group.get_command(click.Context(group), command)
    assert found is not None, command
    return {name for one in found.params for name in one.opts}


def find(path: str) -> Any:
    module, *rest = path.split(".")
    found: Any = importlib.import_module(module)
    for word in rest:
        if not hasattr(found, word):
            try:
                found = importlib.import_module(f"{found.__name__}.{word}")
                continue
            except (ImportError, AttributeError):
                return None
        found = getattr(found, word)
    return found


def test_each_denial_names_what_is_not_there():
    assert [where for where, line in denials() if not MARK.search(line)] == []
    assert len(list(denials())) > 3


@pytest.mark.parametrize("name", sorted(set(marks())))
def test_what_a_page_denies_does_not_exist(name):
    assert not exists(name), f"{name} is there, and a page says that it is not"


@pytest.mark.parametrize(
    "name", ["phalanx.Pipeline", "phalanx.strategies.MirroredStrategy", "phalanx.Pipeline(schedule)", "run--nnodes"]
)
def test_what_was_once_denied_would_be_found(name):
    assert exists(name)
