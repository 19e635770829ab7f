import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import phalanx
import phalanx.cli
from phalanx.cli.commands import SECTIONS, group
from phalanx.cli.docs import TOPICS

COMMANDS = group.list_commands(click.Context(group))


def test_run_is_among_the_commands() -> None:
    assert "run" in COMMANDS
    assert "commands" not in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_folder_has_a_command_with_a_help(name: str) -> None:
    assert isinstance(importlib.import_module(f"phalanx.cli.{name}").command, click.Command)
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output or "SYNOPSIS" in result.output


def test_the_help_lists_every_command_with_a_sentence() -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w+", result.output, re.MULTILINE)


def test_the_version_is_the_packages() -> None:
    assert phalanx.__version__ in CliRunner().invoke(group, ["--version"]).output


@pytest.mark.parametrize(
    ("word", "advice"),
    [("rnu", "Did you mean 'run'?"), ("train.py", "phalanx run train.py"), ("zzz", "Commands: ")],
)
def test_a_mistyped_command_is_answered_with_the_right_one(word: str, advice: str) -> None:
    result = CliRunner().invoke(group, [word])
    assert result.exit_code == 2
    assert advice in result.output


def test_an_option_of_run_without_run_is_answered_with_the_whole_command() -> None:
    result = CliRunner().invoke(group, ["--nproc-per-node", "2", "my train.py"])
    assert result.exit_code == 2
    assert (
        "no such option --nproc-per-node. To run a script: phalanx run --nproc-per-node 2 'my train.py'"
        in result.output
    )
    assert "phalanx run -m pkg" in CliRunner().invoke(group, ["-m", "pkg"]).output
    assert "phalanx run" not in CliRunner().invoke(group, ["--verison"]).output


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
    assert files - set(COMMANDS) == {"__init__", "__main__", "commands", "launch_options", "host_options"}


def test_the_help_shows_each_command_once_under_a_title() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == COMMANDS
    text = CliRunner().invoke(group, ["--help"]).output
    assert [title for title in SECTIONS if f"\n{title}:\n" in text] == list(SECTIONS)


def test_docs_prints_the_address_of_each_topics_page() -> None:
    """The address is that of the package's metadata, and each topic is a page of the documentation's sources."""
    sources = Path(__file__).parents[2] / "docs"
    address = CliRunner().invoke(group, ["docs"]).stdout.strip()
    assert re.fullmatch(r"https://\S+/", address)
    for topic, place in TOPICS.items():
        assert CliRunner().invoke(group, ["docs", topic]).output.strip() == address + place
        assert (sources / f"{place.removesuffix('/')}.md").exists(), topic


def test_messages_and_docstrings_name_topics_that_are_there() -> None:
    package = Path(phalanx.__path__[0])
    named = {
        topic
        for path in package.rglob("*.py")
        for topic in re.findall(r"`phalanx docs ([a-z-]+)`", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert named <= TOPICS.keys()


# What is typed, and what the shell must offer.
COMPLETIONS = [
    ("phalanx doc", "doctor"),
    ("phalanx doctor --j", "--json"),
    ("phalanx run --nproc", "--nproc-per-node"),
    ("phalanx run --rdzv-backend c", "c10d"),
    ("phalanx docs sec", "security"),
    ("phalanx manifest kub", "kubernetes"),
]
ASK = {
    "bash": "{script}\nCOMP_WORDS=({typed}) COMP_CWORD={last}; _phalanx_completion phalanx; echo ${{COMPREPLY[@]}}",
    "fish": "{script}\ncomplete --do-complete '{typed}'",
    # zsh completes in its line editor only: so the function that the editor would call is called here, and the two
    # builtins to which it hands arrays by name print them.
    "zsh": "compdef() {{ :; }}\n{script}\n_describe() {{ print -l -- ${{(P)3}} }}\n"
    "compadd() {{ print -l -- ${{(P)5}} }}\nwords=({typed}) CURRENT={number}\n_phalanx_completion",
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("typed", "offered"), COMPLETIONS)
def test_a_shell_completes_commands_options_and_values(shell: str, typed: str, offered: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = CliRunner().invoke(group, ["completion", shell]).output
    words = typed.split()
    code = ASK[shell].format(script=script, typed=typed, last=len(words) - 1, number=len(words))
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert offered in re.split(r"[\s:]+", done.stdout), done.stdout + done.stderr
