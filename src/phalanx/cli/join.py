"""`phalanx join` lets this host take part in a job that another host has begun."""

from __future__ import annotations

import click

from phalanx._job.launch.join import OWN_OPTIONS, main
from phalanx._job.launch.options import OPTIONS
from phalanx.cli.launch_options import WordsCommand, as_click_option


@click.command(
    "join",
    cls=WordsCommand,
    params=[as_click_option(option) for option in OPTIONS if option.name in OWN_OPTIONS],
    short_help="Take part in a job that `phalanx run --nnodes` has begun on another host.",
)
@click.argument("words", nargs=-1, metavar="HOST:PORT")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Take part in a job that `phalanx run --nnodes` has begun on another host.

    That command prints the whole line. Script, arguments, folder and options come from the other host.
    """
    ctx.exit(main(words))
