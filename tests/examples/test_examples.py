"""The examples run as a reader would run them: alone, under `phalanx run` and under torchrun."""

import os
import re
import sys

import pytest
from tests.examples.commands import ALONE, EXAMPLES, PHALANX_RUN, SCRIPTS, run

from phalanx.checkpoint import load_checkpoint

TORCHRUN = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "2"]


def accuracy(output):
    (found,) = re.findall(r"test accuracy ([\d.]+) on 300 digits", output)
    return float(found)


def epochs(output):
    return re.findall(r"epoch (\d+)/\d+: ([\d,]+) samples", output)


@pytest.mark.slow
def test_digits_reach_their_accuracy_on_two_ranks(tmp_path):
    output = run(tmp_path, PHALANX_RUN, "digits.py")
    assert accuracy(output) >= 0.97
    assert len(epochs(output)) == 12


@pytest.mark.slow
def test_the_report_names_the_straggler(tmp_path):
    launcher = [*PHALANX_RUN, "--report", "out"]
    run(tmp_path, launcher, "report.py", "--epochs", 1, "--samples", 896, "--delay", 0.008)
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.search(r"Rank 1 waits \d+ % of each step for data: load in the background", page)
    assert "is the straggler: it is last to reach" in page
    assert "Rank 1 on" in page


@pytest.mark.slow
def test_digits_go_on_where_they_stopped_with_another_number_of_ranks(tmp_path):
    output = run(tmp_path, ALONE, "digits.py", "--epochs", 1, "--checkpoint", "mine.pt")
    assert epochs(output) == [("1", "1,497")]
    assert accuracy(output) > 0.5
    assert os.listdir(tmp_path) == ["mine.pt"]
    output = run(tmp_path, TORCHRUN, "digits.py", "--epochs", 2, "--checkpoint", "mine.pt", "--resume")
    assert epochs(output) == [("2", "1,498")]
    assert accuracy(output) > 0.7
    assert load_checkpoint(tmp_path / "mine.pt")["sampler"]["epoch"] == 2


def test_digits_script_is_what_a_person_would_write():
    lines = (EXAMPLES / "digits.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    by_rank = [line for line in lines if re.search(r"rank|world_size|environ", line)]
    assert by_rank == ["torch.manual_seed(job.rank)  # each process has a dropout of its own"]


def test_the_demo_says_when_its_speeds_say_nothing(monkeypatch, capsys):
    """On a busy machine it said that two ranks train 6.72 times as fast as one."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    def log(*rates):
        return "".join(f"epoch 1/4: 9 samples in 1 s, {rate:,} samples/s\n" for rate in rates) + "test accuracy 0.9\n"

    for runs, said in (
        ((log(10, 2000, 2100), log(10, 4000, 4200), log(1, 1)), "two ranks train 2.00 times as fast as one"),
        ((log(10, 2000, 2100), log(10, 4000, 9000), log(1, 1)), "other programs use these cores, and the speeds say"),
    ):
        left = list(runs)
        monkeypatch.setattr(demo, "train", lambda *_, left=left: left.pop(0))
        demo.main()
        assert said in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "demo")


@pytest.mark.slow
def test_the_transformer_learns_letters_and_writes_some(tmp_path):
    output = run(tmp_path, PHALANX_RUN, "char_transformer.py", "--steps", 64, "--sample", 20)
    bits = [float(number) for number in re.findall(r"samples/s, bits_per_letter ([\d.]+)", output)]
    assert len(bits) == 8
    assert bits[-1] < min(5.0, bits[0] - 0.5)  # about 6.6 before the first step


@pytest.mark.slow
def test_a_language_model_learns_in_pipeline_stages(tmp_path):
    output = run(tmp_path, PHALANX_RUN, "pipeline_transformer.py", "--steps", 60, "--width", 32)
    bits = [float(number) for number in re.findall(r"step \d+: ([\d.]+) bits per letter", output)]
    assert len(bits) == 4
    assert bits[-1] < bits[0] < 6.7
    assert "balanced by measured time" in output


@pytest.mark.slow
def test_a_convolutional_network_with_skips_learns_in_pipeline_stages(tmp_path):
    three = [*PHALANX_RUN[:-1], "3"]
    output = run(tmp_path, three, "pipeline_unet.py", "--steps", 60, "--checkpoint", "except_last")
    losses = [float(number) for number in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    (overlap,) = re.findall(r"overlap with the discs ([\d.]+)", output)
    assert float(overlap) > 0.3
    assert next(iter(load_checkpoint(tmp_path / "unet.pt")["model"])) == "inwards.0.weight"


@pytest.mark.slow
def test_a_trainer_reaches_its_accuracy_and_goes_on_where_it_stopped(tmp_path):
    output = run(tmp_path, ALONE, "trainer.py", "--strategy", "single_device", "--epochs", 2)
    assert "epoch 2, step 64: test accuracy 0.9" in output
    output = run(tmp_path, PHALANX_RUN, "trainer.py", "--epochs", 3)
    assert "epoch 3, step 96: test accuracy 0.9" in output
    assert "epoch 3/3" in output
    assert "epoch 2/3" not in output
