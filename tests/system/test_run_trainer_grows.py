"""A Trainer's job begins with one rank, on one host, and grows when another host comes."""

import re

import pytest
from tests.system.elastic_hosts import Cluster

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

TRAIN = """
import hashlib, sys, torch, phalanx
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from phalanx.trainer import LambdaCallback

torch.manual_seed(0)
inputs = torch.randn(99, 8)
data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
seen = []


def watch(trainer, loss):
    if trainer.step == 1:
        print("the first step", flush=True)
    if trainer.strategy.num_replicas_in_sync == 2:
        seen.append(trainer.step)
        if len(seen) == 5:
            trainer.stop("both are there")


trainer = phalanx.Trainer(
    model, lambda p: torch.optim.AdamW(p, lr=1e-3), F.mse_loss, max_epochs=10**6,
    callbacks=[LambdaCallback(on_step_end=watch)], show_progress=False, log_dir=sys.argv[1] + "/log", log_every=1,
)
trainer.fit(DataLoader(data, 33, shuffle=True))
bits = b"".join(one.detach().numpy().tobytes() for one in trainer.model.parameters())
print("ended", trainer.strategy.name, seen[-1] - trainer.step, hashlib.sha256(bits).hexdigest(), flush=True)
"""


@pytest.mark.slow
def test_a_trainer_that_begins_alone_trains_with_who_comes(tmp_path):
    """The model was not wrapped where there was one rank, and what came later waited for its gradients.

    And a rank that came divided the batch by more replicas: its epochs had other numbers of steps, and it ended where
    they did not divide it. With strategy="auto", the default, the first rank took "single_device", as it was alone, and
    who came took another one: the job ended.
    """
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with hosts(2) as machines:
        made = Cluster(machines, tmp_path, "1:2", {"WAIT_S": "600"}, ("--rdzv-conf", "last_call_timeout=0"))
        try:
            made.start(0, 1, str(script))
            made.wait_for(0, "the first step")
            made.start(1, 1, str(script))
            first, second = made.ended(0, 1)
        finally:
            made.close()
    assert (first.code, second.code) == (0, 0), first.out
    ends = re.findall(r"\[[^]]+\] ended (\w+) (\d+) (\w+)", first.out)  # equal lines of two ranks may be shown as one
    assert ends, first.out
    assert set(ends) == {("multi_worker_mirrored", "0", ends[0][2])}, first.out
    assert "[0-1" in first.out or len(ends) == 2, first.out
