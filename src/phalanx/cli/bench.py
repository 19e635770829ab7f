"""`phalanx bench` measures collectives and links on the user's machine."""

from __future__ import annotations

import difflib
import os
import sys

import click

_MOST_RANKS = 64


class _Benches(click.Group):
    """A group of commands that suggests the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names:
            near = difflib.get_close_matches(args[0], names, n=1)
            advice = f"Did you mean {near[0]!r}? " if near else ""
            ctx.fail(f"no benchmark {args[0]!r}. {advice}Benchmarks: {', '.join(names)}.")
        return super().resolve_command(ctx, args)


@click.group("bench", cls=_Benches, invoke_without_command=True, short_help="Benchmark collectives and links.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Benchmark collectives and links."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command("collectives", short_help="Measure collectives between ranks of this host.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="The device of the tensors."
)
@click.option("--world-size", type=click.IntRange(1, _MOST_RANKS), default=2, show_default=True, help="Ranks.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="The median is printed.")
@click.option("--json", "in_json", is_flag=True, help="Print every figure as JSON.")
def _collectives(device: str, world_size: int, rounds: int, in_json: bool) -> None:
    """Measure collectives of 4 KiB to 64 MiB between ranks that this command starts.

    With --device cuda, ranks are assigned to GPUs in turn; ranks on the same GPU exchange through host memory.
    """
    import torch

    from phalanx._tools.bench import collectives
    from phalanx.testing import RankFailed

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if problem := collectives.refuse(device, torch.cuda.is_available(), gpus):
        raise click.UsageError(problem)
    where = f"{min(gpus, world_size)} x {torch.cuda.get_device_name(0)}" if device == "cuda" else "the CPU"
    try:
        with _Progress() as progress:
            progress.show(f"five collectives of 4 KiB to 64 MiB, {world_size} ranks on {where}, {rounds} rounds each")
            seconds = collectives.measure(world_size, device, rounds)
    except RankFailed as failure:
        raise click.ClickException(str(failure)) from failure
    lines = (
        [collectives.as_json(seconds, world_size, where)]
        if in_json
        else collectives.as_text(seconds, world_size, where)
    )
    for line in lines:
        click.echo(line)


@command.command("link", short_help="Measure latency and bandwidth between the hosts of a job.")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Exchanges of each size.")
@click.option("--json", "in_json", is_flag=True, help="Print every figure as JSON.")
def _link(rounds: int, in_json: bool) -> None:
    """Measure the links between hosts, and print the option with which Phalanx uses the result to choose algorithms.

    Run it in a job on several hosts; one rank on each is enough:

    \b
      phalanx run --nnodes 2 --nproc-per-node 1 -m phalanx bench link
      torchrun --nnodes 2 ... -m phalanx bench link
    """
    if "RANK" not in os.environ:
        raise click.UsageError(
            "this process is not a rank of a job. On several hosts: "
            "phalanx run --nnodes 2 --nproc-per-node 1 -m phalanx bench link"
        )
    from phalanx._tools.bench.link import run
    from phalanx.errors import PhalanxError

    try:
        run(rounds, click.echo, in_json=in_json)
    except PhalanxError as error:
        raise click.ClickException(str(error)) from error


class _Progress:
    """`_Progress` prints the current measurement to stderr; on a terminal, in a line that is cleared at the end."""

    def __init__(self) -> None:
        self._redraws = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show `text`, which on a terminal replaces the previous text."""
        if self._redraws:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)
        else:
            click.echo(text, err=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._redraws:
            click.echo("\r\x1b[K", nl=False, err=True)
