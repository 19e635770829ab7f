"""`phalanx top`: what is a running job doing?"""

from __future__ import annotations

import os
import sys

import click


@click.command("top", short_help="Watch a running job: ranks, steps, time, memory.")
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print it once and end; also what happens without a terminal.")
@click.option("--json", "as_data", is_flag=True, help="Print it once, as one JSON object.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.pass_context
def command(ctx: click.Context, job: str | None, once: bool, as_data: bool, interval: float) -> None:
    """Watch a running job: hosts and ranks, steps, where the time goes, memory, who is slowest.

    JOB is the process number of a `phalanx run` of yours on this host, or the name of its script; it may be left out
    when only one is running. The job does nothing for it and is not slowed down. q ends it.
    """
    from rich.console import Console

    from phalanx.diagnostics.printable import printable_lines
    from phalanx.errors import LaunchError
    from phalanx.inspect.stacks.job_choice import choose_job
    from phalanx.inspect.top.as_json import as_json
    from phalanx.inspect.top.table import all_lines, as_text
    from phalanx.inspect.top.watch import Watch

    console = Console(file=sys.stdout, highlight=False)
    try:
        os.nice(10)  # whoever looks on makes way for those who work
        watch = Watch(choose_job(job, "phalanx top"))
        if as_data:
            click.echo(as_json(watch.look_once()))
        elif once or not console.is_terminal or console.is_dumb_terminal:
            lines = all_lines(watch.look_once(), console.width if console.is_terminal else None)
            if console.is_terminal:
                console.print(*lines, sep="\n")
            else:
                click.echo(as_text(lines))
        else:
            from phalanx.inspect.top.screen import show

            last = show(watch, interval)
            if last is not None:
                console.print(*all_lines(last, console.width), sep="\n")
                click.echo(f"Job {last.pid} has ended.")
    except LaunchError as error:
        click.echo(printable_lines(str(error)), err=True)
        ctx.exit(error.exit_code)
