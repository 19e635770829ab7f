"""`phalanx completion` lets a shell complete the commands, their options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_PHALANX_COMPLETE"  # the variable by which click knows that a shell asks


@click.command("completion", short_help="Print a script by which bash, zsh or fish completes `phalanx`.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a script by which SHELL completes commands, options, values and files.

    \b
      bash:  echo 'eval "$(phalanx completion bash)"' >> ~/.bashrc
      zsh:   echo 'eval "$(phalanx completion zsh)"' >> ~/.zshrc       (behind the line with compinit)
      fish:  phalanx completion fish > ~/.config/fish/completions/phalanx.fish

    Open a new shell afterwards. The script for bash needs bash 4.4 or newer.
    """
    from phalanx.cli.commands import group

    found = get_completion_class(shell)
    assert found is not None, f"click knows no shell {shell}"
    click.echo(found(group, {}, "phalanx", _VARIABLE).source())
