"""What the documents say can be typed: links lead somewhere, commands, options and names of the package exist.

Blocks of some are run as they stand (tests/articles, tests/libraries, tests/examples); these checks are of all.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import phalanx
from phalanx._job.launch.options import OPTIONS as RUN_OPTIONS
from phalanx.cli.commands import group

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/*/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
PAST = ROOT / "CHANGELOG.md"  # it tells of commands that were

_each = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@_each
def test_links_lead_to_a_file_and_to_a_heading_of_it(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@_each
def test_commands_their_options_and_the_files_that_they_name_exist(document):
    if document == PAST:
        return
    for line in _commands(document.read_text()):
        if problem := _problem_of(line):
            pytest.fail(f"{document.relative_to(ROOT)}: {line}\n{problem}")


def _blocks(text: str, languages: str) -> Iterator[str]:
    for language, code in re.findall(r"^```([\w:-]*)[^\n]*\n(.*?)^```$", text, re.M | re.S):
        if re.fullmatch(languages, language):
            yield code


def _commands(text: str) -> Iterator[list[str]]:
    """Lines of shells, without what stands before the program."""
    inline = re.findall(r"`((?:phalanx|make|python) [^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    in_blocks = "\n".join([*_blocks(text, "|bash|console|sh"), *re.findall(r"^    (.*?)(?:   .*)?$", text, re.M)])
    for line in [*inline, *in_blocks.replace("\\\n", " ").splitlines()]:
        line = re.sub(r"^\s*(\$ |[\w-]+\$ )?", "", line)
        if not re.match(r"(?:[A-Z_]+=\S+ |srun |mpirun (?:-\w+ \S+ )*)*(phalanx|make|python3?) ", line):
            continue
        if "…" in line or " ..." in line or "│" in line:
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # it goes on in the next line
            continue
        while words and words[0] not in ("phalanx", "make", "python", "python3"):
            words.pop(0)
        yield words


def _problem_of(words: list[str]) -> str:
    if words[0] == "make":
        named = [word for word in words[1:] if re.fullmatch("[a-z]+", word)]
        return "" if set(named) <= TARGETS else f"the Makefile has no {min(set(named) - TARGETS)}"
    if words[0] == "phalanx":
        return _problem_of_phalanx(words[1:])
    if words[1:2] == ["-m"]:
        return "" if not words[2:] or _exists(words[2]) else f"there is no module {words[2]}"
    script = words[1] if len(words) > 1 else ""
    if not re.match(r"(examples|benchmarks|tests)/", script):
        return ""  # a script of the reader's
    if not (ROOT / script).exists():
        return f"there is no {script}"
    given = {word.partition("=")[0] for word in words[2:] if re.match(r"--[a-z]", word)}
    known = set(re.findall(r"\"(--[a-z-]+)\"", _source_of(ROOT / script)))
    return f"{script} has no {min(given - known)}" if given - known else ""


def _source_of(script: Path) -> str:
    """With what stands beside it, and the options that all benchmarks have."""
    more = ROOT.glob("benchmarks/harness/*.py") if "benchmarks" in script.parts else []
    return "\n".join(path.read_text() for path in [*script.parent.glob("*.py"), *more])


def _exists(module: str) -> bool:
    where = ROOT / module.replace(".", "/")
    return where.with_suffix(".py").exists() or where.is_dir() or importlib.util.find_spec(module) is not None


def _problem_of_phalanx(words: list[str]) -> str:
    """Options are looked at up to the script's name, behind which they are the script's."""
    command: click.Command = group
    place = "phalanx"
    while words:
        word = words.pop(0)
        if re.fullmatch(r"-{1,2}[a-z][\w-]*(=.*)?", word):
            name, has_value, _ = word.partition("=")
            name = name.replace("_", "-") if command.name == "run" else name  # torchrun's older spelling
            options = _options_of(command)
            if name == "--help" or not options:
                continue
            if name not in options:
                return f"{place} has no {name}"
            if options[name] and not has_value and words:
                words.pop(0)
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return f"{place} has no {word}" if re.fullmatch("[a-z-]+", word) else ""
            command, place = found, f"{place} {word}"
        else:
            break
    return ""


def _options_of(command: click.Command) -> dict[str, bool]:
    """By name, with whether a value follows."""
    if command.name == "run":
        named = {f"--{option.name}": bool(option.value) for option in RUN_OPTIONS}
        return named | {f"-{option.short}": bool(option.value) for option in RUN_OPTIONS if option.short}
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {text: not (one.is_flag or one.count) for one in options for text in (*one.opts, *one.secondary_opts)}


@_each
def test_names_of_the_package_and_their_arguments_exist(document):
    for code in _blocks(document.read_text(), "python[^\n]*"):
        try:
            tree = ast.parse(code)
        except SyntaxError:  # a piece with dots for what the reader has
            continue
        known: dict[str, Any] = {"phalanx": phalanx}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    if one.name.partition(".")[0] == "phalanx":
                        module = importlib.import_module(one.name)
                        known[one.asname or "phalanx"] = module if one.asname else phalanx
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "phalanx":
                module = importlib.import_module(node.module)
                for one in node.names:
                    known[one.asname or one.name] = getattr(module, one.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                _find(node, known)
            elif isinstance(node, ast.Call) and (called := _find(node.func, known)) is not None:
                _require_arguments(called, [word.arg for word in node.keywords if word.arg])


def _find(node: ast.AST, known: dict[str, Any]) -> Any:
    """What a chain of names stands for, None if it does not begin with one of ours."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _find(node.value, known)
    if owner is None or not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return None
    return getattr(owner, node.attr)


def _require_arguments(called: Any, words: list[str]) -> None:
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        assert set(words) <= set(parameters), f"{called.__qualname__} has no argument {set(words) - set(parameters)}"


def test_the_index_of_documents_is_whole():
    """Who looks for a document finds it from the README, by a link or through another one."""
    reached, open_ones = set(), [ROOT / "README.md"]
    while open_ones:
        document = open_ones.pop()
        if document in reached:
            continue
        reached.add(document)
        for link in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", document.read_text()):
            if "://" not in link:
                open_ones.append((document.parent / link).resolve())
    missing = {path for path in DOCUMENTS if ROOT / "docs" in path.parents} - reached
    assert not missing, sorted(map(str, missing))
