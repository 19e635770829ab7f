import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import phalanx
import phalanx.cli
from phalanx.cli.commands import group

COMMANDS = group.list_commands(click.Context(group))


def test_run_is_among_the_commands() -> None:
    assert "run" in COMMANDS
    assert "commands" not in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_folder_has_a_command_with_a_help(name: str) -> None:
    assert isinstance(importlib.import_module(f"phalanx.cli.{name}").command, click.Command)
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_help_lists_every_command_with_a_sentence() -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w+", result.output, re.MULTILINE)


def test_the_version_is_the_packages() -> None:
    assert phalanx.__version__ in CliRunner().invoke(group, ["--version"]).output


@pytest.mark.parametrize(
    ("word", "advice"),
    [("rnu", "Did you mean 'run'?"), ("train.py", "phalanx run train.py"), ("zzz", "There are: ")],
)
def test_a_mistyped_command_is_answered_with_the_right_one(word: str, advice: str) -> None:
    result = CliRunner().invoke(group, [word])
    assert result.exit_code == 2
    assert advice in result.output


def test_listing_the_commands_loads_none_of_them() -> None:
    code = (
        "import sys, click\n"
        "from phalanx.cli.commands import group\n"
        "group.list_commands(click.Context(group))\n"
        "print([name for name in sys.modules if name in ('torch', 'phalanx.cli.run', 'phalanx.launch')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_file_of_the_folder_is_a_command_or_the_entry() -> None:
    files = {path.stem for path in Path(phalanx.cli.__path__[0]).glob("*.py")}
    assert files - set(COMMANDS) == {"__init__", "__main__", "commands"}
