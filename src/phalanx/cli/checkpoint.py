"""`phalanx checkpoint` prints the contents of a checkpoint."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.checkpoint.contents import CheckpointContents


@click.group("checkpoint", short_help="Inspect a checkpoint.")
def command() -> None:
    """Inspect a checkpoint without loading it."""


@command.command("inspect", short_help="Print the contents of a checkpoint.")
@click.argument("path", type=click.Path())
@click.option("--verify", is_flag=True, help="Also verify all checksums, which reads all files.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def inspect(ctx: click.Context, path: str, verify: bool, as_json: bool) -> None:
    """Print the contents of PATH: names, types, shapes and sizes of its tensors, and all other values.

    PATH is a checkpoint of a CheckpointManager or the folder of its checkpoints (then the latest), a file of torch.save
    or save_checkpoint, or a folder of torch.distributed.checkpoint; a checkpoint of Phalanx may have an address such as
    s3://bucket/runs/a. Damaged files are named, and the exit code is 1.
    """
    from phalanx.checkpoint.contents import inspect as look_into
    from phalanx.errors import CheckpointError

    try:
        contents = look_into(path, verify=verify)
    except CheckpointError as error:
        click.echo(error, err=True)
        ctx.exit(1)
    if as_json:
        click.echo(json.dumps(contents.as_dict(), indent=1))
    elif sys.stdout.isatty():
        _print_table(contents, verify)
    else:
        for item in contents.items:
            fields = [item.name, item.dtype, _shape(item.shape), _size(item.nbytes)] if item.dtype else [item.name]
            click.echo("\t".join([*fields, item.value] if item.value else fields))
        click.echo(_summary(contents, verify))
    for problem in contents.damage:
        click.echo(problem, err=True)
    if contents.damage:
        ctx.exit(1)


def _print_table(contents: CheckpointContents, verified: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "type", "shape"):
        table.add_column(title, overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("value", overflow="fold")
    for item in contents.items:
        shape, size = (_shape(item.shape), _size(item.nbytes)) if item.dtype else ("", "")
        table.add_row(*map(Text, (item.name, item.dtype, shape, size, item.value)))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(_summary(contents, verified)))


def _summary(contents: CheckpointContents, verified: bool) -> str:
    tensors = [item for item in contents.items if item.dtype]
    facts = [f"{contents.path}: {contents.form}"]
    if contents.step is not None:
        facts.append(f"step {contents.step}")
    if contents.world_size is not None:
        facts.append(f"saved by {contents.world_size} rank{'s' if contents.world_size > 1 else ''}")
    if contents.created:
        facts.append(f"{contents.created}, torch {contents.torch}")
    facts += [f"{name} {value:.6g}" for name, value in contents.metrics.items()]
    facts.append(f"{len(tensors)} tensors of {_size(sum(item.nbytes for item in tensors))}")
    facts.append(f"{_size(contents.nbytes)} on disk")
    if verified and not contents.damage:
        facts.append("all checksums match")
    if contents.others:
        facts.append(f"older ones: {', '.join(contents.others)}")
    return ", ".join(facts)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join("?" if size < 0 else str(size) for size in shape) or "()"  # noqa: RUF001 - as people write shapes


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
