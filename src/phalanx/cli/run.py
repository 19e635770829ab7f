"""`phalanx run` as the list of commands knows it; its words are parsed by `phalanx.launch.command_line`."""

from __future__ import annotations

import click

from phalanx.launch.command import main


@click.command(
    "run",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a script on every core or GPU of this host.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Run a script on every core or GPU of this host."""
    ctx.exit(main(words))
