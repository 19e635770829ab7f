"""`phalanx manifest` writes the file to submit to a scheduler."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group("manifest", short_help="Write the file to submit to Slurm or Kubernetes.")
def command() -> None:
    """Write the complete file to submit for a `phalanx run` command.

    After the options, give the arguments of `phalanx run`; if they begin with options, put `--` before them:

    \b
      phalanx manifest slurm --nodes 2 train.py --lr 0.1 > job.sh
      phalanx manifest kubernetes --nodes 2 --image IMAGE -- --max-restarts 3 train.py > job.yaml
    """


def _common(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed((
        click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED),
        click.option("--nodes", type=click.IntRange(min=1), required=True, help="Number of nodes."),
        click.option("--name", help="The job's name (default: the script's)."),
        click.option("--cpus", type=click.IntRange(min=1), default=None, help="Cores on each node."),
        click.option("--gpus", type=click.IntRange(min=1), default=None, help="GPUs on each node."),
        click.option("--memory", default="", help="Memory on each node, in the scheduler's format."),
        click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of stdout."),
    )):  # fmt: skip
        function = option(function)
    return function


@command.command("slurm", context_settings=_WORDS, short_help="A batch script for `sbatch`.")
@_common
@click.option("--time", "time_limit", default="", help="Time limit, in sbatch's format: 2:00:00.")
@click.option("--partition", default="", help="Partition.")
@click.option("--log", default="%x-%j.log", show_default=True, help="Where Slurm writes the job's output.")
@click.pass_context
def slurm(ctx: click.Context, /, time_limit: str, partition: str, log: str, **asked: Any) -> None:
    """Write a batch script: `srun` starts one `phalanx run` on each node, and they find each other."""
    from phalanx._job.manifests.slurm import write_batch_script

    def write(request: Any) -> str:
        program = [str(Path(sys.executable).parent / "phalanx")]
        if not Path(program[0]).exists():
            program = [sys.executable, "-m", "phalanx"]
        return write_batch_script(request, program, time=time_limit, partition=partition, output=log)

    _write(ctx, write, **asked)


@command.command("kubernetes", context_settings=_WORDS, short_help="A Job for `kubectl apply`.")
@_common
@click.option("--image", required=True, help="The image, with Phalanx and the script.")
@click.option("--namespace", default="", help="Namespace.")
@click.option("--secret", default="phalanx-key", show_default=True, help="The Secret with the job's key.")
@click.option("--folder", default="", help="Working directory in the image.")
@click.option("--user", type=click.IntRange(min=0), default=1000, show_default=True, help="User ID; 0: root.")
@click.option("--shm", default="", help="Limit on /dev/shm (default: --memory, or 8Gi).")
@click.pass_context
def kubernetes(
    ctx: click.Context, /, image: str, namespace: str, secret: str, folder: str, user: int, shm: str, **asked: Any
) -> None:
    """Write a headless Service and an indexed Job with a pod for each node; the key comes from a Secret."""
    from phalanx._job.manifests.kubernetes import KubernetesCluster, write_manifest

    cluster = KubernetesCluster(image, namespace, secret, folder, user, shm)
    _write(ctx, lambda request: write_manifest(request, cluster), **asked)


def _write(ctx: click.Context, write: Callable[[Any], str], output: str | None, **asked: Any) -> None:
    from phalanx._job.manifests.request import JobRequest, read_words
    from phalanx.errors import LaunchError

    words = tuple(asked["words"])
    try:
        settings = read_words(words, asked["nodes"])
        target = settings.target.name.rpartition("/")[2].removesuffix(".py")
        name = asked["name"] or re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-") or "phalanx"
        each = asked["cpus"] or 0, asked["gpus"] or 0, asked["memory"]
        text = write(JobRequest(words, settings, asked["nodes"], name, *each))
    except LaunchError as error:
        click.echo(error, err=True)
        ctx.exit(error.exit_code)
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"cannot write {output}: {error.strerror}.") from error
