"""Add `phalanx run` to the list of commands; `phalanx._job.launch.command_line` parses its words."""

from __future__ import annotations

import click

from phalanx._job.launch.command import main
from phalanx._job.launch.options import OPTIONS
from phalanx.cli.launch_options import WordsCommand, as_click_option


@click.command(
    "run",
    cls=WordsCommand,
    params=[as_click_option(option) for option in OPTIONS],
    short_help="Run a script on every core or GPU of this host, or of several.",
)
@click.argument("words", nargs=-1, metavar="SCRIPT [ARGUMENTS]...", type=click.Path())
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Run a script on every core or GPU of this host, or of several hosts.

    All words after SCRIPT belong to the script. `phalanx run --help` prints the options on two screens.
    """
    ctx.exit(main(words))
