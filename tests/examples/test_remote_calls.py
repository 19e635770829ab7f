"""The examples of remote calls, each by its one command."""

import re

import pytest
from tests.examples.commands import PHALANX_RUN, run


@pytest.mark.slow
def test_a_language_model_over_two_workers_reaches_the_loss_of_one_process(tmp_path):
    output = run(tmp_path, PHALANX_RUN, "remote_language_model.py", "--steps", 40, "--words", 500, "--width", 32)
    (first,) = re.findall(r"step 0: loss ([\d.]+)", output)
    remote, alone = (float(found) for found in re.findall(r"test loss ([\d.]+)", output))
    assert abs(remote - alone) < 2e-6
    assert remote < float(first) - 1


@pytest.mark.slow
def test_observers_learn_from_actions_that_are_chosen_in_batches(tmp_path):
    output = run(tmp_path, PHALANX_RUN, "batched_actor_critic.py", "--updates", 8)
    (moves,) = re.findall(r"the last 50 episodes: ([\d.]+) moves", output)
    assert float(moves) > 30  # about 22 without learning
    assert "4,096 calls answered by 256 forward passes" in output
