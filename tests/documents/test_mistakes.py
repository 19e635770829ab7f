"""Each mistake of docs/how-to/mistakes.md, and of errors that newcomers meet, is made: its last screen says all.

A screen has 24 lines of 80 columns. On the last one are the rank, the line, the fact and what to do.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass

import pytest
from tests.documents.blocks import ROOT
from tests.documents.typed import run

ROWS, COLUMNS = 24, 80
PAGE = (ROOT / "docs" / "how-to" / "mistakes.md").read_text(encoding="utf-8")
BEGIN = """
import torch, phalanx
from torch.utils.data import DataLoader, TensorDataset
job = phalanx.init()
"""
MODEL = """
model = phalanx.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
STEPS = """
for step in range(5):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
APART = "torch.manual_seed(job.rank)\n"


@dataclass(frozen=True)
class Mistake:
    """A script, and what its last screen has: who, what happened and what to do."""

    script: str
    words: tuple[str, ...]
    code: int = 0


# By the first column of the page's table, whose warnings end nothing.
WARNINGS = {
    "Ranks were given the same batch.": Mistake(
        BEGIN + MODEL + "torch.manual_seed(0)" + STEPS,
        ("all 2 ranks", "same batch in each of the first 3 steps", "sampler=phalanx.DistributedSampler(dataset)"),
    ),
    "Ranks draw the same random numbers in forward (dropout).": Mistake(
        BEGIN
        + MODEL.replace("torch.nn.Linear(4, 2)", "torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(4, 2))")
        + "torch.manual_seed(0)\nbatches = torch.randn(2, 5, 8, 4)"
        + STEPS.replace("torch.randn(8, 4)", "batches[job.rank, step]"),
        ("all 2 ranks", "same random numbers", "torch.manual_seed(seed + torch.distributed.get_rank())"),
    ),
    "A parameter differs between ranks.": Mistake(
        BEGIN + MODEL + APART + "with torch.no_grad(): model.module.bias += job.rank" + STEPS,
        ("rank 1", "'bias'", "check_replicas(model)"),
    ),
    "The output or a gradient is NaN on some ranks only.": Mistake(
        BEGIN + MODEL + APART + STEPS.replace("torch.randn(8, 4)", "torch.randn(8, 4) / (1 - job.rank)"),
        ("rank 1", "NaN", "Look at that rank's data first"),
    ),
    "The optimizer holds another copy of the parameters.": Mistake(
        BEGIN
        + "import copy\nplain = torch.nn.Linear(4, 2)\n"
        + "optimizer = torch.optim.SGD(copy.deepcopy(plain).parameters(), 0.1)\n"
        + "model = phalanx.DistributedDataParallel(plain)\n"
        + APART
        + STEPS,
        ("optimizer", "copy", "AdamW(model.parameters(), ...)"),
    ),
    "Steps were given the batches of steps 1 to 3 again, in the same order.": Mistake(
        BEGIN + MODEL + APART + "batches = torch.randn(4, 8, 4)" + STEPS.replace("range(5)", "range(12)").replace(
            "torch.randn(8, 4)", "batches[step % 4]"
        ),
        ("steps 5 to 7", "batches of steps 1 to 3 again", "set_epoch(epoch)"),
    ),
}  # fmt: skip
ERRORS = {
    "replicas differ": Mistake(
        BEGIN + MODEL + "with torch.no_grad(): model.module.bias += job.rank\nphalanx.check_replicas(model)",
        ("rank 1 differs from rank 0 by up to 1", "script.py", "'bias'"),
        1,
    ),
    "a branch": Mistake(
        BEGIN
        + MODEL
        + APART
        + STEPS
        + "    if job.is_main and step == 2: phalanx.save_checkpoint('m.pt', model.module.state_dict())",
        ("rank 0", "rank 1", "script.py", "if rank == 0"),
        1,
    ),
    "unequal batches": Mistake(
        BEGIN + MODEL + APART + STEPS.replace("range(5)", "range(5 + 2 * job.rank)"),
        ("rank 0", "after gradients #5", "script.py", "drop_last"),
        1,
    ),
    "unequal batches with PyTorch's class": Mistake(
        (BEGIN + MODEL + APART + STEPS.replace("range(5)", "range(5 + 2 * job.rank)")).replace(
            "phalanx.Dist", "torch.nn.parallel.Dist"
        ),
        ("rank 0", "script.py", "drop_last"),
        1,
    ),
    "spawned workers without a guard": Mistake(
        BEGIN
        + "data = TensorDataset(torch.randn(64, 4))\n"
        + "for _ in DataLoader(data, 16, num_workers=1, multiprocessing_context='spawn'): pass",
        ("rank", "script.py", "__name__"),
        1,
    ),
    "mp.spawn without a guard": Mistake(
        "import torch.multiprocessing as mp\ndef work(rank): pass\nmp.spawn(work, nprocs=2)",
        ("script.py", "__name__"),
        1,
    ),
    "an exception on one rank": Mistake(
        BEGIN + MODEL + APART + STEPS + "    if job.rank == 1: raise ValueError('the data is wrong')",
        ("rank 1 of 2", "ValueError: the data is wrong", "script.py"),
        1,
    ),
    "a missing torch": Mistake(
        "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "sys.modules.pop('torch', None)  # a rank begins with torch imported\n"
        "import torch",
        ("of 2", "script.py:6", "No module named 'torch'", f"{shlex.quote(sys.executable)} -m pip install"),
        1,
    ),
    "a wrong shape": Mistake(
        BEGIN + "torch.distributed.all_reduce(torch.ones(2 + job.rank))",
        ("rank 0: all_reduce(SUM) of float32 (2,)", "rank 1: all_reduce(SUM) of float32 (3,)", "script.py"),
        1,
    ),
}


def last_screen(output: str) -> str:
    rows = [line[at : at + COLUMNS] for line in output.splitlines() for at in range(0, max(1, len(line)), COLUMNS)]
    return "\n".join(rows[-ROWS:])


def test_each_warning_of_the_page_is_made():
    assert re.findall(r"^\| ([A-Z].+?\.) \|", PAGE.partition("## ")[0], re.M) == list(WARNINGS)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*WARNINGS.values(), *ERRORS.values()], ids=[*WARNINGS, *ERRORS])
def test_rank_line_fact_and_advice_are_on_the_last_screen(mistake, tmp_path):
    (tmp_path / "script.py").write_text(mistake.script)
    done = run(["phalanx", "run", "--nproc-per-node", "2", "script.py"], tmp_path)
    screen = last_screen(done.output)
    assert done.code == mistake.code, screen
    whole = screen.replace("\n", "")  # words are cut where a row ends
    assert [words for words in mistake.words if words not in whole] == [], screen
