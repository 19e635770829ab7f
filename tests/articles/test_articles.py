"""articles.md is what it says: blocks give the article's numbers, commands start, tests that are named exist."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.distributed.rpc

import phalanx._comm.backend.process_group  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "articles.md").read_text(encoding="utf-8")
BLOCKS = {
    name: (kind, code) for kind, name, code in re.findall(r"^```diff (\w+):([\w-]+)\n(.*?)^```$", PAGE, re.M | re.S)
}
COMMANDS = re.search(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)[1].splitlines()
FROM_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# What stands above a block that is a script, and what a command starts.
SCRIPT = """
import sys, torch
port, losses = {port!r}, []
def done(rank):
    with open(f"{folder}/{{rank}}", "w") as out:
        out.write(repr(losses))
{code}
"""
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(tensor)
open(f"said-{dist.get_rank()}", "w").write(f"{dist.get_backend()} {dist.get_world_size()} {tensor.item()}")
dist.destroy_process_group()
"""

_KEPT = []


def version(code, leave_out):
    """The lines of a block without those that begin with `leave_out`."""
    return "".join(line[1:] for line in code.splitlines(keepends=True) if line[0] != leave_out)


def named(kind):
    return [name for name, (its_kind, _) in BLOCKS.items() if its_kind == kind]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(rank, world_size, code, folder, port, second_port):
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(5, (60,)))

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))

    names = {"net": net, "dataset": dataset, "loss_fn": torch.nn.functional.cross_entropy, "losses": []}
    names["second_address"] = f"tcp://127.0.0.1:{second_port}"
    exec(code, names)
    backend = torch.distributed.get_backend()
    if backend == "phalanx":
        torch.distributed.destroy_process_group()
    else:  # Gloo's group, freed while autograd's threads still hold parts of it, now and then never comes back
        torch.distributed.barrier()
        _KEPT.append(names)
    state = names["model"].state_dict() if "weights" not in names and "model" in names else {}
    return backend, names["losses"], names.get("weights", state)


def in_ranks(code, folder):
    folder.mkdir()
    return run_ranks(_run, 2, code, str(folder), free_port(), free_port(), init=False)


@pytest.mark.slow(but=("point-to-point",))
@pytest.mark.parametrize("name", named("ranks"))
@pytest.mark.filterwarnings("ignore")  # what torch says of its own parts is the article's affair
def test_a_block_gives_the_numbers_of_the_article(tmp_path, name):
    _, code = BLOCKS[name]
    theirs, ours = in_ranks(version(code, "+"), tmp_path / "article"), in_ranks(version(code, "-"), tmp_path / "here")
    assert [backend for backend, *_ in theirs] == ["gloo"] * 2
    assert [backend for backend, *_ in ours] == ["phalanx"] * 2
    for (_, losses, weights), (_, their_losses, their_weights) in zip(ours, theirs, strict=True):
        assert losses == their_losses
        assert losses or weights
        assert list(weights) == list(their_weights)
        assert all(torch.equal(weights[key], their_weights[key]) for key in weights)


@pytest.mark.parametrize("name", named("new"))
def test_a_block_of_which_the_article_cannot_run_here_leaves_equal_weights_on_every_rank(tmp_path, name):
    ours = in_ranks(version(BLOCKS[name][1], "-"), tmp_path / "here")
    (backend, _, weights), (_, _, others) = ours
    assert backend == "phalanx"
    assert weights
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if name not in FROM_LAUNCHERS}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "OMP_NUM_THREADS": "1", "PATH": path, **variables}


def as_script(name, side, folder):
    """The block as a file, and where its ranks write what they got."""
    folder.mkdir()
    kind, code = BLOCKS[name]
    code = version(code, side) + ("done(rank)\n" if kind == "srun" else "")
    script = folder / "train.py"
    script.write_text(SCRIPT.format(port=free_port(), folder=folder, code=code))
    return script


def spawn(script):
    subprocess.run([sys.executable, str(script)], env=environment(), check=True, timeout=600)


def srun(script):
    """What Slurm's srun does to two tasks of one node."""
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS="2"),
        )
        for rank in range(2)
    ]
    assert [task.wait(100) for task in tasks] == [0, 0]


@pytest.mark.parametrize(("name", "start"), [("spawn", spawn), ("slurm", srun)])
@pytest.mark.slow
def test_a_script_gives_the_numbers_of_the_article(tmp_path, name, start):
    said = []
    for side in "+-":
        script = as_script(name, side, tmp_path / f"without{side}")
        start(script)
        said.append([(script.parent / str(rank)).read_text() for rank in range(2)])
    assert said[0] == said[1] == ["[2.0, 2.0, 2.0]"] * 2


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow(but=("phalanx run --nproc-per-node 2 train.py",))
def test_a_command_starts_the_script_on_two_ranks(tmp_path, command):
    (tmp_path / "train.py").write_text(TRAIN)
    words = command.replace("29512", free_port()).split()  # the page's port may be in use beside us
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # in a container, say
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"said-{rank}").read_text() for rank in range(2)] == ["phalanx 2 3.0"] * 2


def test_every_block_is_run_and_every_test_that_is_named_is_there():
    assert {kind for kind, _ in BLOCKS.values()} <= {"ranks", "new", "script", "srun"}
    assert PAGE.count("```diff") == len(BLOCKS)
    references = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(references) > 10
    for file, test in references:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), f"{file}::{test}"
    for link, anchor in re.findall(r"\]\(([\w./-]+\.md)#?([\w-]*)\)", PAGE):
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "how-to" / link).read_text(encoding="utf-8"), re.M)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings]
