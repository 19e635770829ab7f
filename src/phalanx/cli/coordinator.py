"""`phalanx coordinator` runs, by itself, the service in which the processes of a job meet."""

from __future__ import annotations

import sys

import click


@click.command("coordinator", short_help="Run the service in which the hosts of a job meet, by itself.")
@click.option(
    "--bind", default=":29400", show_default=True, metavar="[HOST]:PORT", help="Where it listens; port 0: any."
)
@click.option("--key-file", type=click.Path(dir_okay=False), help="The job's key, in a file of yours alone.")
@click.option("--job", default="", help="The job's name; a host that asks for another is refused.")
@click.option(
    "--lost-after", default=10.0, show_default=True, metavar="SECONDS", help="Who is silent for so long is lost."
)
@click.pass_context
def command(ctx: click.Context, bind: str, key_file: str | None, job: str, lost_after: float) -> None:
    """Keep a job's keys, members and reports, until Ctrl-C. Only who knows the job's key is let in.

    `phalanx run --nnodes` starts one by itself, on the first host: this command is for a coordinator that is to outlive
    every host of the job.
    """
    from phalanx._job.coordinator.command import run_coordinator
    from phalanx.errors import CoordinationError

    try:
        run_coordinator(bind, key_file, job=job, lost_after_s=lost_after, say=lambda line: click.echo(line, err=True))
    except (CoordinationError, ValueError) as error:
        click.echo(error, err=True)
        ctx.exit(1)
    sys.stdout.flush()
