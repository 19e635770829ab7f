"""`phalanx doctor` checks whether training would work on this host, and prints what to fix."""

from __future__ import annotations

import sys

import click


@click.command("doctor", short_help="Check whether training would work on this host.")
@click.option("--json", "in_json", is_flag=True, help="Print findings and facts as JSON.")
@click.option("--hosts", metavar="[USER@]HOST,…", help="Check these hosts over ssh, and the links between them.")
@click.option("--hostfile", metavar="FILE", type=click.Path(), help="The same hosts, listed in a file.")
@click.option("--ssh", metavar="COMMAND", help="The command that reaches a host, with its options.")
@click.option("--remote-python", metavar="PYTHON", help="The Python on the hosts.")
@click.pass_context
def command(ctx: click.Context, /, in_json: bool, **over_ssh: str | None) -> None:
    """Examine this host, train for one step on two ranks, and print a fix for each problem.

    The exit code is 0 if training works, even with warnings, and 1 if it does not.

    With --hosts, print the checks of `phalanx run --hosts` in one table. Then measure latency and bandwidth between
    each pair of hosts, with the engine that a job uses, and mark slow links.
    """
    if any(over_ssh.values()):
        from phalanx._job.ssh.job import main as run_over_ssh

        words = [f"--{name.replace('_', '-')}={value}" for name, value in over_ssh.items() if value]
        target = ["-m", "phalanx", "bench", "link", *(["--json"] if in_json else [])]
        ctx.exit(run_over_ssh([*words, "--remote-dir=/", "--nproc-per-node=1", *target]))
    from phalanx._tools.doctor.checks import run_checks, would_train
    from phalanx._tools.doctor.host import examine
    from phalanx._tools.doctor.report import as_json, as_text, print_table

    facts = examine()
    findings = run_checks(facts)
    if in_json:
        click.echo(as_json(facts, findings))
    elif sys.stdout.isatty():
        print_table(findings)
    else:
        click.echo(as_text(findings))
    ctx.exit(0 if would_train(findings) else 1)
