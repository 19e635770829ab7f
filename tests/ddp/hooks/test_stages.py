"""The order of collectives when buckets need several each."""

import pytest
import torch

from phalanx.ddp.bucket import DenseBucket
from phalanx.ddp.comm_hook import GradBucket
from phalanx.ddp.hooks.stages import StagedBuckets
from phalanx.ddp.plan import Bucket, Slot


class _Recorded:
    """A collective that notes when it is started and when it is waited for."""

    def __init__(self, events, name):
        self.events, self.name = events, name
        events.append(f"start {name}")

    def wait(self):
        self.events.append(f"wait {self.name}")


def _bucket(index):
    plan = Bucket(index, torch.float32, torch.device("cpu"), 1, (Slot(0, "w", 0, 1),))
    return GradBucket(DenseBucket(plan, [torch.zeros(1)], torch.zeros(1), as_view=True), is_last=False)


def _stages(events, index, names="ab"):
    for name in names:
        yield _Recorded(events, f"{index}{name}")
    return torch.full((1,), float(index))


def test_each_launch_moves_every_earlier_bucket_on_by_one_stage():
    events, pipeline = [], StagedBuckets()
    futures = [pipeline.launch(_bucket(index), _stages(events, index)) for index in range(3)]
    assert [future.wait().item() for future in futures] == [0.0, 1.0, 2.0]
    assert [future.value().item() for future in futures] == [0.0, 1.0, 2.0]
    assert events == [
        *["start 0a"],
        *["start 1a", "wait 0a", "start 0b"],
        *["start 2a", "wait 0b", "wait 1a", "start 1b"],
        *["wait 1b", "wait 2a", "start 2b", "wait 2b"],
    ]


def test_a_backward_that_was_interrupted_leaves_nothing_to_the_next():
    events, pipeline = [], StagedBuckets()
    pipeline.launch(_bucket(0), _stages(events, 0))
    events.clear()
    pipeline.launch(_bucket(0), _stages(events, 7)).wait()
    assert events == ["start 7a", "wait 7a", "start 7b", "wait 7b"]


def test_a_bucket_that_needs_no_collective_is_done_at_once():
    assert StagedBuckets().launch(_bucket(0), _stages([], 0, "")).wait().item() == 0.0


def test_a_step_behind_the_hook_runs_when_somebody_waits_and_errors_keep_their_type():
    events, pipeline = [], StagedBuckets()
    doubled = pipeline.launch(_bucket(0), _stages(events, 4)).then(lambda future: future.value() * 2)
    assert events == ["start 4a"]
    assert doubled.wait().item() == 8.0

    def failing():
        yield _Recorded(events, "x")
        raise ConnectionError("the peer is gone")

    future = pipeline.launch(_bucket(0), failing())
    with pytest.raises(ConnectionError, match="the peer is gone"):
        future.wait()


def test_a_bucket_of_pytorchs_own_goes_through_all_its_stages_at_once():
    class Foreign:
        def index(self):
            return 0

    events = []
    future = StagedBuckets().launch(Foreign(), _stages(events, 0))
    assert events == ["start 0a", "wait 0a", "start 0b", "wait 0b"]
    assert future.value().item() == 0.0
