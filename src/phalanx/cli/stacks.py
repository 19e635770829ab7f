"""`phalanx stacks` shows where each rank of a running job is."""

from __future__ import annotations

import click

from phalanx.cli.host_options import host_options, run_on_host


@click.command("stacks", short_help="Show where each rank of a running job is.")
@click.argument("job", required=False)
@host_options
@click.pass_context
def command(ctx: click.Context, /, job: str | None, **over_ssh: str | None) -> None:
    """Print each rank's current operation and Python stacks, without stopping it.

    JOB is the pid of your `phalanx run` on this host, or the name of its script; leave it out if only one job is
    running. For a job on several hosts, name the first host with --host, or run the command there.
    """
    if any(value is not None for value in over_ssh.values()):
        run_on_host(ctx)
    from phalanx._comm.diagnostics.printable import printable_lines
    from phalanx._job.inspect.stacks.report import report_stacks
    from phalanx.errors import LaunchError

    try:
        click.echo(printable_lines(report_stacks(job)))
    except LaunchError as error:
        click.echo(printable_lines(str(error)), err=True)
        ctx.exit(error.exit_code)
