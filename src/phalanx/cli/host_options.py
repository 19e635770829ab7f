"""Define the options with which a command that inspects a job runs on another host, over ssh: `--host` and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import click
from click.core import ParameterSource

_NAMES = ("host", "ssh", "remote_python")


def host_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in (
        click.option("--remote-python", metavar="PYTHON", help="The Python on that host."),
        click.option("--ssh", metavar="COMMAND", help="The command that reaches the host, with its options."),
        click.option("--host", metavar="[USER@]HOST", help="Run this command on that host, over ssh."),
    ):
        function = option(function)
    return function


def run_on_host(ctx: click.Context) -> NoReturn:
    """Run the command of `ctx` with the same arguments on the host that --host names."""
    from phalanx._job.ssh.remote_command import exec_on_host
    from phalanx.errors import LaunchError

    if ctx.params["host"] is None:
        raise click.UsageError("--ssh and --remote-python are for a job on another host. Give --host, too")
    try:
        exec_on_host(ctx.params["host"], _words_typed(ctx), ssh=ctx.params["ssh"], python=ctx.params["remote_python"])
    except LaunchError as error:
        click.echo(str(error), err=True)
        ctx.exit(error.exit_code)


def _words_typed(ctx: click.Context) -> list[str]:
    """Return the command and its arguments as typed, without the options of `host_options`."""
    options, arguments = [], []
    for param in ctx.command.params:
        name = param.name or ""
        if name in _NAMES or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = str(ctx.params[name])
        if isinstance(param, click.Option):
            options.append(param.opts[0] if param.is_flag else f"{param.opts[0]}={value}")
        else:
            arguments.append(value)
    return [ctx.command.name or "", *options, *(["--", *arguments] if arguments else [])]
