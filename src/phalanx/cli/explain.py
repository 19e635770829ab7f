"""`phalanx explain` shows how collectives and pipelines work."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from phalanx._comm.schedules.algorithms import ALGORITHMS, Algorithm, build
from phalanx._comm.schedules.network import Topology
from phalanx._comm.schedules.schedule import Operation

T = TypeVar("T")


def _amount(name: str, parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` as an option's type: a ValueError becomes a usage error that names the option."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from error

    convert.__name__ = name  # click shows it in the help
    return convert


def _parse_world_size(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"world size {text!r} must be a number of ranks, at least 1")
    return int(text)


def _parse_backward(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} must be above 0, and finite")
    return value


def _parse_hosts(text: str) -> Topology:
    """Parse the number of ranks on each host, such as 2,3."""
    return Topology.of_sizes(_parse_world_size(part) for part in text.split(","))


_WORLD_SIZE = _amount("N", _parse_world_size)

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_DRAW = "Also draw it to this SVG file."
_WHICH = "The collective."


class _Explanations(click.Group):
    """A group that suggests the nearest name, and treats dashes and underscores alike."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name.replace("_", "-"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0].replace("_", "-"), names, n=1)
            advice = f"Did you mean {near[0]!r}? " if near else ""
            ctx.fail(f"no explanation of {args[0]!r}. {advice}Explanations: {', '.join(names)}.")
        return super().resolve_command(ctx, args)


@click.group("explain", cls=_Explanations, short_help="Show how a collective or a pipeline works.")
def command() -> None:
    """Show how a collective or a pipeline works.

    For an algorithm, show which rank sends which chunk to which rank in each step, from the schedule that is executed;
    `pipeline` draws when each stage of a model works on each micro-batch.
    """


def _explain(
    algorithm: Algorithm,
    operation: Operation,
    world_size: int | None,
    hosts: Topology | None,
    root: int,
    svg: Path | None,
    whole: bool,
) -> None:
    from phalanx._tools.explain import drawing, steps

    schedule = _as_usage_error(build, algorithm.name, operation, _topology(algorithm, world_size, hosts), root)
    _as_usage_error(steps.require_readable, schedule)
    if svg is not None:
        _write(svg, _as_usage_error(drawing.draw, schedule))
    if not whole and steps.count_lines(schedule) > steps.MOST_LINES:
        for line in steps.summary(schedule):
            click.echo(line)
    elif sys.stdout.isatty():
        from rich.console import Console

        steps.show(schedule, Console())
    else:
        for line in steps.plain(schedule):
            click.echo(line)


def _topology(algorithm: Algorithm, world_size: int | None, hosts: Topology | None) -> Topology:
    if hosts is not None:
        if world_size not in (None, hosts.world_size):
            raise click.UsageError(
                f"--hosts has {hosts.world_size} ranks, --world-size says {world_size}; leave one out"
            )
        return hosts
    size = 4 if world_size is None else world_size
    if algorithm.one_host:
        return Topology.one_host(size)
    return Topology.filled(size, 2) if algorithm.name == "hierarchical" else Topology.flat(size)


def _explanation_of(algorithm: Algorithm) -> click.Command:
    def explain(
        operation: Operation,
        world_size: int | None,
        svg: Path | None,
        whole: bool,
        hosts: Topology | None = None,
        root: int = 0,
    ) -> None:
        _explain(algorithm, operation, world_size, hosts, root, svg, whole)

    operations = list(algorithm.operations)
    params: list[click.Parameter] = [
        click.Option(["--world-size"], type=_WORLD_SIZE, help="Number of ranks.  [default: 4]"),
        click.Option(
            ["--operation"], type=click.Choice(operations), default="all_reduce", show_default=True, help=_WHICH
        ),
        click.Option(["--svg"], type=_FILE, help=_DRAW),
        click.Option(["--all", "whole"], is_flag=True, help="Show every step, even for many ranks."),
    ]
    if algorithm.name == "hierarchical":
        hosts_help = "Number of ranks on each host.  [default: 2 on each]"
        params.append(click.Option(["--hosts"], type=_amount("N,N,…", _parse_hosts), help=hosts_help))
    if {"broadcast", "reduce"} & set(operations):
        root_help = "The rank where a broadcast starts or a reduce ends."
        params.append(click.Option(["--root"], type=int, default=0, show_default=True, help=root_help))
    return click.Command(
        algorithm.name.replace("_", "-"),
        callback=explain,
        params=params,
        help=f"Show {algorithm.title}, step by step: the chunks sent between ranks, and the contents of each rank.",
        short_help=f"{algorithm.title[0].upper()}{algorithm.title[1:]}, step by step.",
    )


for _algorithm in ALGORITHMS.values():
    command.add_command(_explanation_of(_algorithm))


@command.command("pipeline", short_help="Draw when each stage of a model works on each micro-batch.")
@click.option("--stages", type=_WORLD_SIZE, help="Number of stages of the model.  [default: 4]")
@click.option("--ranks", type=_WORLD_SIZE, help="Number of ranks.  [default: one per stage, or per two if interleaved]")
@click.option("--micro-batches", type=_WORLD_SIZE, help="Micro-batches per mini-batch.  [default: 8]")
@click.option("--schedule", "name", metavar="NAME", help="gpipe, 1f1b, interleaved or zero_bubble.  [default: 1f1b]")
@click.option(
    "--backward",
    type=_amount("FLOAT", _parse_backward),
    default=2.0,
    show_default=True,
    help="Time of a backward, as a multiple of a forward.",
)
@click.option("--svg", type=_FILE, help=_DRAW)
def _pipeline(
    stages: int | None,
    ranks: int | None,
    micro_batches: int | None,
    name: str | None,
    backward: float,
    svg: Path | None,
) -> None:
    """Draw the schedule that a pipeline executes, and its bubble: the time in which ranks wait.

    All stages are assumed to take the same time.
    """
    from phalanx.pipeline import explanation
    from phalanx.pipeline.schedule import plan_schedule

    name, stages = name or "1f1b", stages or 4
    if ranks is None:
        ranks = stages // 2 if name == "interleaved" and stages % 2 == 0 else stages
    schedule = _as_usage_error(plan_schedule, name, ranks, micro_batches or 8, stages)
    timeline = explanation.ideal(schedule, backward)
    if svg is not None:
        _write(svg, explanation.draw(schedule, timeline))
    for line in explanation.facts(schedule, timeline):
        click.echo(line)
    if sys.stdout.isatty():
        from rich.console import Console

        explanation.show(schedule, timeline, Console())
    else:
        for line in explanation.plain(schedule, timeline):
            click.echo(line)


def _as_usage_error(function: Callable[..., T], *arguments: object) -> T:
    """Call `function`, and turn its ValueError into a usage error, which has no traceback."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}.") from error
    click.echo(f"Drawn into {path}.", err=True)
