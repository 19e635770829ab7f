"""`phalanx join`: take part in a job that another host has begun."""

from __future__ import annotations

import click

from phalanx.launch.hosts.join import main


@click.command(
    "join",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    short_help="Take part in a job that `phalanx run --nnodes` has begun on another host.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Take part in a job that `phalanx run --nnodes` has begun on another host."""
    ctx.exit(main(words))
