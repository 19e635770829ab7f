"""`phalanx doctor` says whether training would work on this host, and what is in its way."""

from __future__ import annotations

import sys

import click


@click.command("doctor", short_help="Check whether training would work on this host.")
@click.option("--json", "in_json", is_flag=True, help="Print findings and facts as JSON.")
@click.pass_context
def command(ctx: click.Context, in_json: bool) -> None:
    """Examine this host, train for one step on two ranks, and say for each problem what to do.

    The exit code is 0 when training works, warnings or not, and 1 when it does not.
    """
    from phalanx._tools.doctor.checks import judge, would_train
    from phalanx._tools.doctor.examination import examine
    from phalanx._tools.doctor.report import as_json, as_text, print_table

    facts = examine()
    findings = judge(facts)
    if in_json:
        click.echo(as_json(facts, findings))
    elif sys.stdout.isatty():
        print_table(findings)
    else:
        click.echo(as_text(findings))
    ctx.exit(0 if would_train(findings) else 1)
