"""`phalanx completion` prints the script with which a shell completes commands, options and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_PHALANX_COMPLETE"  # the shell sets this variable to request completions from click


@click.command("completion", short_help="Print a completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a script with which SHELL completes commands, options, values and files.

    \b
      bash:  echo 'eval "$(phalanx completion bash)"' >> ~/.bashrc
      zsh:   echo 'eval "$(phalanx completion zsh)"' >> ~/.zshrc       (after the line with compinit)
      fish:  phalanx completion fish > ~/.config/fish/completions/phalanx.fish

    Open a new shell afterwards. The script for bash needs bash 4.4 or newer.
    """
    from phalanx.cli.commands import group

    found = get_completion_class(shell)
    assert found is not None, f"click does not support the shell {shell}"
    click.echo(found(group, {}, "phalanx", _VARIABLE).source())
