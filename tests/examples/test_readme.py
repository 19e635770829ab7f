"""What the README says of itself: the script of "Before and after" is the same training, alone and on two ranks.

It said "one process, as before" of a script whose batch was half of what it had been.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tests.documents.typed import run

from phalanx.checkpoint import load_checkpoint

README = (Path(__file__).parents[2] / "README.md").read_text()
ASIDE = """
class MyDataset(torch.utils.data.TensorDataset):
    def __init__(self):
        samples = torch.randn(256, 10, generator=torch.Generator().manual_seed(0))
        super().__init__(samples, (samples.sum(1) > 0).long())

class MyModel(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(10, 2)

DataLoader = torch.utils.data.DataLoader
torch.manual_seed(0)
"""


def script(sign):
    """One side of the diff, with what it leaves to the reader."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = [line[2:] for line in diff.splitlines() if not line.strip() or line[0] in (" ", sign)]
    imports = [line for line in lines if line.startswith("import ")]
    return "\n".join([*imports, ASIDE, *(line for line in lines if line not in imports)])


def train(folder, sign, *launcher):
    folder.mkdir()
    (folder / "train.py").write_text(script(sign))
    done = run([*launcher, "train.py"], folder)
    assert (done.code, done.warnings) == (0, []), done.output
    return load_checkpoint(folder / "model.pt")


@pytest.mark.slow
def test_the_script_trains_alike_alone_and_on_two_ranks_and_its_file_loads_into_the_bare_module(tmp_path):
    phalanx = str(Path(sysconfig.get_path("scripts")) / "phalanx")
    before = train(tmp_path / "before", "-", sys.executable)
    alone = train(tmp_path / "alone", "+", sys.executable)
    two = train(tmp_path / "two", "+", phalanx, "run", "--nproc-per-node", "2")
    assert before.keys() == alone.keys() == two.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
    torch.nn.Linear(10, 2).load_state_dict(two)


def test_the_words_of_the_command_line_are_there(tmp_path):
    """Every `phalanx run` option and every file that the README names exists."""
    help_text = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", "run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in set(re.findall(r"phalanx run (--[a-z-]+)", README)):
        assert option in help_text
    for link in set(re.findall(r"\]\(([^)#]+)\)", README)):
        if "://" not in link:
            assert (Path(__file__).parents[2] / link).exists(), link
