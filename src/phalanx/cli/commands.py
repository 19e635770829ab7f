"""List the commands: every module of this package with a click command named `command`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import shlex

import click

import phalanx
import phalanx.cli

_NOT_COMMANDS = ("commands", "launch_options", "host_options", "__main__")

# `phalanx --help` shows these commands under these titles.
SECTIONS = {
    "Run a job": ("run", "join", "manifest", "key", "coordinator"),
    "Inspect a job": ("top", "stacks", "report", "checkpoint"),
    "Inspect this host": ("doctor", "bench"),
    "Learn": ("docs", "explain", "completion"),
}


class _Commands(click.Group):
    """A click group that imports a command's module when the command is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            module.name for module in pkgutil.iter_modules(phalanx.cli.__path__) if module.name not in _NOT_COMMANDS
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(100)) for name, one in commands if one])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"phalanx.cli.{cmd_name}").command
        assert isinstance(command, click.Command), f"phalanx.cli.{cmd_name}.command is not a click command"
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not error.possibilities:
                ctx.fail(f"no such option {error.option_name}. To run a script: phalanx run {shlex.join(words)}")
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], names, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(names)}."
            if args[0].endswith(".py"):
                advice = f"To run a script: phalanx run {args[0]}"
            ctx.fail(f"no command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`phalanx COMMAND --help` describes a command. `phalanx docs` prints the address of the documentation.",
)
@click.version_option(phalanx.__version__, prog_name="phalanx")
def group() -> None:
    """Train PyTorch models on many processes."""
