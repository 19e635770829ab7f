"""The diff of docs/how-to/trainer.md, from a loop by hand to a Trainer and back: it applies, and changes no bit."""

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import phalanx.checkpoint.series
import phalanx.trainer.trainer  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text(encoding="utf-8")
(DIFF,) = re.findall(r"^```diff\n(--- .*?)^```$", PAGE, re.M | re.S)
HUNK = DIFF.split("@@\n")[1].splitlines(keepends=True)
BY_HAND = "".join(line[1:] for line in HUNK if line[0] != "+")
WITH_TRAINER = "".join(line[1:] for line in HUNK if line[0] != "-")


def run(rank, world_size, script, folder):
    os.chdir(folder)
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(script, "train.py", "exec"), names)
    weights = {name.removeprefix("module."): one for name, one in names["model"].state_dict().items()}
    if "scheduler" in names:
        weights["rate"] = torch.tensor(names["scheduler"].get_last_lr())
    return weights, said.getvalue()


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_by_hand_and_the_trainer_that_takes_its_place_end_with_the_same_bits(tmp_path, world_size):
    """Nobody had run the diff: it lacked imports, called functions that were not there, and validated nothing."""
    ends = {}
    for name, script in (("by hand", BY_HAND), ("trainer", WITH_TRAINER)):
        (tmp_path / name).mkdir()
        ends[name] = run_ranks(run, world_size, script, tmp_path / name)
    for (left, _), (right, _) in zip(ends["by hand"], ends["trainer"], strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(one, right[key]) for key, one in left.items())
    hand, moved = (said.splitlines()[-1] for _, said in (ends["by hand"][0], ends["trainer"][0]))
    assert hand == moved
    assert re.fullmatch(r"step \d+: loss \d+\.\d{6}", hand)


def test_patch_takes_the_diff_there_and_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    (tmp_path / "move.diff").write_text(DIFF)
    for words, end in (([], WITH_TRAINER), (["-R"], BY_HAND)):
        subprocess.run(["git", "apply", "-p0", *words, "move.diff"], cwd=tmp_path, check=True, capture_output=True)
        assert script.read_text() == end
