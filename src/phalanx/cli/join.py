"""`phalanx join` adds this host to a job that another host has started."""

from __future__ import annotations

import click

from phalanx._job.launch.join import OWN_OPTIONS, main
from phalanx._job.launch.options import OPTIONS
from phalanx.cli.launch_options import WordsCommand, as_click_option


@click.command(
    "join",
    cls=WordsCommand,
    params=[as_click_option(option) for option in OPTIONS if option.name in OWN_OPTIONS],
    short_help="Join a job that `phalanx run --nnodes` has started on another host.",
)
@click.argument("words", nargs=-1, metavar="HOST:PORT")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Join a job that `phalanx run --nnodes` has started on another host.

    That command prints the line to type here, and sends the script, arguments, folder and options.
    """
    ctx.exit(main(words))
