"""`phalanx report` shows the report of a run, or compares several runs."""

from __future__ import annotations

import sys

import click


@click.command("report", short_help="Show the report of a run, or compare several runs.")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False), help="Also write the comparison as a page.")
@click.pass_context
def command(ctx: click.Context, folders: tuple[str, ...], html: str | None) -> None:
    """Show the report of `phalanx run --report DIR`; compare several reports in columns.

    If the command was killed before it could write the report, write the report now, from the ranks' records.
    """
    from rich.console import Console

    from phalanx._job.report.compare import compare_page, compare_rows, load, print_comparison, print_run

    try:
        runs = [load(folder) for folder in folders]
        if html is not None:
            with open(html, "w", encoding="utf-8") as file:
                file.write(compare_page(folders, runs))
    except (OSError, ValueError) as error:
        click.echo(f"phalanx report: {error}", err=True)
        ctx.exit(2)
    console = Console(file=sys.stdout, highlight=False)
    if len(runs) == 1:
        print_run(console, folders[0], runs[0])
    else:
        print_comparison(console, folders, compare_rows(runs))
    if html is not None:
        click.echo(f"The comparison is in {html}")
