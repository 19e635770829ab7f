"""`phalanx coordinator` runs the coordinator of a job in a process of its own."""

from __future__ import annotations

import sys

import click


@click.command("coordinator", short_help="Run the coordinator of a job's hosts as a separate service.")
@click.option(
    "--bind", default=":29400", show_default=True, metavar="[HOST]:PORT", help="The address; port 0: any free one."
)
@click.option("--key-file", type=click.Path(dir_okay=False), help="The file with the job's key, readable only by you.")
@click.option("--job", default="", help="The job's name; hosts of other jobs are refused.")
@click.option(
    "--lost-after", default=10.0, show_default=True, metavar="SECONDS", help="A member silent for so long is lost."
)
@click.pass_context
def command(ctx: click.Context, bind: str, key_file: str | None, job: str, lost_after: float) -> None:
    """Serve a job's keys, members and reports until Ctrl-C. Clients must have the job's key.

    `phalanx run --nnodes` starts a coordinator on the first host. Use this command for a coordinator that must survive
    every host of the job.
    """
    from phalanx._job.coordinator.command import run_coordinator
    from phalanx.errors import CoordinationError

    try:
        run_coordinator(bind, key_file, job=job, lost_after_s=lost_after, log=lambda line: click.echo(line, err=True))
    except (CoordinationError, ValueError) as error:
        click.echo(error, err=True)
        ctx.exit(1)
    sys.stdout.flush()
