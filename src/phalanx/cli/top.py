"""`phalanx top` shows what a running job is doing."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from phalanx._base.deadline import Deadline
from phalanx.cli.host_options import host_options, run_on_host

if TYPE_CHECKING:
    from phalanx._job.inspect.top.watch import JobWatch

_POLL_S = 0.5  # how often to check whether the job has ended


@click.command("top", short_help="Watch a running job: ranks, steps, time, memory.")
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print once and exit, as without a terminal.")
@click.option("--json", "as_data", is_flag=True, help="Print once, as one JSON object.")
@click.option("--web", is_flag=True, help="Serve a page on this machine for a browser, and print its address.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port for --web (default: a free one).")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between updates."
)
@host_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: str | None,
    once: bool,
    as_data: bool,
    web: bool,
    port: int,
    interval: float,
    **over_ssh: str | None,
) -> None:
    """Watch a running job: hosts, ranks, steps, where the time goes, memory, the slowest rank. Press q to quit.

    JOB is the pid of your `phalanx run` on this host, or the name of its script; leave it out if only one job is
    running. The job is not slowed down. For a job on several hosts, name the first host with --host, or run the command
    there.

    With --web, a page shows the same with curves, and the pictures of the run's report if one is recorded. Only
    browsers on this machine reach the page, and only with the address, which has a token. Press Ctrl-C to quit.
    """
    if any(value is not None for value in over_ssh.values()):
        if web and over_ssh["host"] is not None:
            raise click.UsageError(
                "--web and --host: the page is only for browsers on that host. Forward a port: "
                f"ssh -t -L 8000:127.0.0.1:8000 {over_ssh['host']} phalanx top --web --port 8000"
            )
        run_on_host(ctx)
    from rich.console import Console

    from phalanx._comm.diagnostics.printable import printable_lines
    from phalanx._job.inspect.stacks.jobs import choose_job
    from phalanx._job.inspect.top.as_json import as_json
    from phalanx._job.inspect.top.table import all_lines, as_text
    from phalanx._job.inspect.top.watch import JobWatch
    from phalanx.errors import LaunchError

    console = Console(file=sys.stdout, highlight=False)
    try:
        os.nice(10)  # observers must not slow down the job
        watch = JobWatch(choose_job(job, "phalanx top"))
        if web:
            _serve(watch, port)
        elif as_data:
            click.echo(as_json(watch.sample_once()))
        elif once or not console.is_terminal or console.is_dumb_terminal:
            lines = all_lines(watch.sample_once(), console.width if console.is_terminal else None)
            if console.is_terminal:
                console.print(*lines, sep="\n")
            else:
                click.echo(as_text(lines))
        else:
            from phalanx._job.inspect.top.screen import show

            last = show(watch, interval)
            if last is not None:
                console.print(*all_lines(last, console.width), sep="\n")
                click.echo(f"Job {last.pid} has ended.")
    except LaunchError as error:
        click.echo(printable_lines(str(error)), err=True)
        ctx.exit(error.exit_code)


def _serve(watch: JobWatch, port: int) -> None:
    """Serve the page until the job has ended, or Ctrl-C is pressed."""
    import secrets

    from phalanx._job.inspect.http_server import HTTPServer
    from phalanx._job.report.live_page import LivePage
    from phalanx.errors import LaunchError

    token = secrets.token_urlsafe(16)
    try:
        server = HTTPServer("127.0.0.1", port, LivePage(watch).pages, token=token)
    except OSError as error:
        raise LaunchError(f"phalanx top: --web --port {port}: {error.strerror or error}", exit_code=2) from None
    try:
        click.echo(f"{server.address}/?token={token}")
        click.echo(
            "Open this address on this machine. From another machine, first: ssh -L "
            f"{server.port}:127.0.0.1:{server.port} to this machine. Press Ctrl-C to quit.",
            err=True,
        )
        Deadline.after(None).wait_until(watch.has_ended, _POLL_S)
        click.echo(f"Job {watch.job.pid} has ended.")
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
