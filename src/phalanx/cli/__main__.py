"""The `phalanx` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `phalanx` script."""
    words = sys.argv[1:]
    if words[:1] == ["run"]:
        # The one command whose start people wait for does not wait for click.
        from phalanx.launch.command import main as run

        sys.exit(run(words[1:]))
    from phalanx.cli.commands import group
    from phalanx.launch.output.standard import guarded

    guarded(lambda: group(prog_name="phalanx"))


if __name__ == "__main__":
    main()
