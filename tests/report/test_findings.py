"""Each finding from measurements that were made up for it, and none from those of a run without fault."""

import dataclasses
import math
import random

import pytest
from tests.report.measured import GIB, STEP, measured, rank

from phalanx._job.report.findings import find
from phalanx._job.report.measurements import PARTS, CollectiveTimes, Lateness, RunEvent


def texts(run):
    return [finding.text for finding in find(run)]


def test_a_run_without_fault_is_told_so():
    (finding,) = find(measured(rank(0), rank(1)))
    assert finding.severity == "good"
    assert "93 %" in finding.text


@pytest.mark.parametrize(
    ("workers", "advice"),
    [(0, "DataLoader(num_workers=2)"), (4, "more DataLoader workers (now 4)"), (None, "ahead of the step")],
)
def test_one_rank_waits_for_data(workers, advice):
    (text,) = texts(measured(rank(0), rank(1, parts={"data": 0.044}, num_workers=workers)))
    assert text.startswith("Rank 1 waits 31 % of each step for data: ")
    assert advice in text


@pytest.mark.parametrize(
    ("whom", "said"),
    [("stages", "for other stages: more micro-batches"), ("servers", "for parameter servers: more servers")],
)
def test_what_ranks_wait_for_outside_of_collectives_is_named_and_no_straggler_for_it(whom, said):
    facts = rank(0).facts | {"waits_for": [whom]}
    late = (Lateness(0, 490, 0.01), Lateness(1, 10, 0.0)) if whom == "stages" else ()
    ranks = [rank(number, parts={"waiting": 0.044}, facts=facts) for number in range(2)]
    (text,) = texts(measured(*ranks, lateness=late))
    assert text.startswith("Every rank waits up to 3")
    assert said in text


def test_the_straggler_is_named_with_what_it_does_longer():
    ranks = [rank(0, parts={"waiting": 0.03}), rank(1, parts={"backward": 0.083}), rank(2, parts={"waiting": 0.03})]
    late = (Lateness(0, 10, 0.0), Lateness(1, 480, 0.028), Lateness(2, 10, 0.0))
    found = [text for text in texts(measured(*ranks, lateness=late)) if "straggler" in text]
    assert found[0].startswith("Rank 1 on one is the straggler: it is last to reach 96 % of the collectives")
    assert "its backward takes longer (83.0 ms a step against 55.0 ms)" in found[0]
    busy = dataclasses.replace(ranks[1], preemptions_per_s=300.0)
    assert "it is preempted 300 times a second" in texts(measured(ranks[0], busy, ranks[2], lateness=late))[0]
    far = dataclasses.replace(ranks[1], host="two")
    assert "two may be a slower machine" in texts(measured(ranks[0], far, ranks[2], lateness=late))[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_a_straggler_only_where_it_does_something_longer(seed):
    """A rank that was 0.24 ms late in ranks that lost their cores 15 times a second was called the straggler."""
    draw = random.Random(seed)
    apart, step_s, often = draw.uniform(0, 0.01), sum(STEP.values()), draw.choice([0.0, 15.0, 60.0])
    ranks = [rank(0, preemptions_per_s=often), rank(1, preemptions_per_s=often)]
    ranks[1].parts["backward"] += apart
    late = (Lateness(0, 10, 0.0), Lateness(1, 480, 0.012))
    found = " ".join(texts(measured(*ranks, lateness=late)))
    noise = min(0.2, 0.004 * often)
    assert ("Ranks are preempted on their cores" in found) == (apart < noise * step_s)
    assert ("is the straggler" in found) == (apart >= max(0.05, noise) * step_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_few_noisy_steps_are_no_loss_that_rises(seed):
    """The loss of a step jumps: every second short run whose loss fell little was told that it rises."""
    draw = random.Random(seed)
    loss = tuple((step, 2.0 + draw.gauss(0, 0.3)) for step in range(24))
    assert not [text for text in texts(measured(rank(0), loss=loss)) if "The loss rises" in text]


@pytest.mark.parametrize(
    ("rows", "hosts", "advice"),
    [
        ((), ("one", "one"), "accumulate gradients"),
        ((), ("one", "two"), "phalanx.DiLoCo"),
        ((CollectiveTimes("all_reduce", 64, 2, 10000, 1e-5, 1e-5, 1e6),), ("one", "one"), "combine them"),
    ],
)
def test_moving_data_takes_long(rows, hosts, advice):
    ranks = [rank(i, host=host, parts={"communication": 0.04}) for i, host in enumerate(hosts)]
    (text,) = texts(measured(*ranks, collectives=rows))
    assert text.startswith("29 % of each step is communication between ranks")
    assert advice in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": ((1.0, 1.0), (2.0, math.nan))}, "not finite from step 2 on"),
        ({"loss": tuple((i, 1.0 + i) for i in range(40))}, "The loss rises"),
        ({"throughput": tuple((i, 640.0 - 8 * i) for i in range(60))}, "The run became slower"),
        ({"end": "killed"}, "was killed"),
        ({"end": "stopped", "end_text": "stopped by SIGINT"}, "stopped by SIGINT, after step 500"),
        (
            {"end": "failed", "events": (RunEvent(3.0, "failure", "ValueError: no", 1),)},
            "Rank 1 failed first: ValueError",
        ),
        ({"events": (RunEvent(3.0, "loss", "SIGKILL; replaced", 1),)}, "Rank 1 was lost, and the others continued"),
    ],
)
def test_what_happened_to_the_run(changes, said):
    assert any(said in text for text in texts(measured(rank(0), rank(1), **changes)))


def test_the_same_cause_on_many_hosts_is_told_once():
    crowded = {"facts": {"cores": 8, "threads": 16, "cpus": []}}
    starved = {"cpu_share": 0.3, "preemptions_per_s": 90.0}
    found = texts(measured(*(rank(n, f"host-{n}", **(crowded if n < 5 else starved)) for n in range(7))))
    assert [text for text in found if "threads" in text] == [
        "On host-0, host-1 and 3 more hosts 16 threads each compute on 8 cores: set OMP_NUM_THREADS=8, or start fewer "
        "ranks."
    ]
    (one,) = (text for text in found if "take the cores" in text)
    assert one.startswith("On host-5 and host-6 other programs take the cores: ranks 5, 6 got one for 30 % of the time")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": {"update": 0.06}}, "in the optimizer: use the fused optimizer"),
        ({"parts": {"other": 0.05}}, "outside of the steps"),
        ({"facts": {"cores": 8, "threads": 8, "cpus": []}}, "16 threads compute on 8 cores: set OMP_NUM_THREADS=4"),
        ({"cpu_share": 0.3, "preemptions_per_s": 90.0}, "other programs take the cores: ranks 0, 1"),
        ({"memory_curve": tuple((i, GIB * (1 + i / 40)) for i in range(40))}, "grows all the time"),
        ({"peak_bytes": 31 * GIB}, "have used 97 % of its memory"),
        ({"longest_s": 4.0}, "The longest step took 4.00 s"),
        ({"first_step": 40.0}, "The script took 39.0 s to its first step"),
        ({"attempt": 2}, "restarted twice"),
    ],
)
def test_what_is_wrong_with_every_rank(changes, said):
    assert any(said in text for text in texts(measured(rank(0, **changes), rank(1, **changes))))


def test_only_another_backend_keeps_no_record_of_what_ranks_sent():
    """A run of backend phalanx whose steps had no collectives was told that only phalanx keeps a record of them."""

    def said(backend):
        ranks = [rank(number, facts={"backend": backend}) for number in (0, 1)]
        return [text for text in texts(measured(*ranks, num_matched=0, lateness=())) if "are unknown" in text]

    assert said("phalanx") == said("cpu:phalanx,cuda:nccl") == []
    assert said("gloo")[0].startswith("The waits and messages of ranks are unknown: the backend was gloo, and only")


@pytest.mark.parametrize(
    ("broken", "stays", "said"),
    [(1500, False, "not finite at step 1,500:"), (1500, True, "not finite from step 1,500 on:")],
)
def test_the_step_whose_loss_broke_is_named(broken, stays, said):
    loss = ((1496.0, 1.0), (1504.0, math.nan), (1512.0, 1.0))
    assert said in texts(measured(rank(0), rank(1), loss=loss, broken_step=broken, stays_broken=stays))[0]


def test_where_a_rank_was_when_it_died():
    run = measured(
        rank(0), rank(1, ended=False, last_phase="backward", steps=316), end="failed",
        events=(RunEvent(3.0, "failure", "SIGKILL", 1),),
    )  # fmt: skip
    assert "it was in backward of step 317" in texts(run)[0]


def test_no_run_however_odd_is_without_words_or_an_end():
    draw = random.Random(7)
    for _ in range(300):
        ranks = []
        for number in range(draw.randint(0, 5)):
            parts = {part: draw.choice([0.0, draw.random()]) for part in PARTS}
            steps = draw.choice([0, 1, 9, 500])
            ranks.append(
                rank(number, parts=parts, steps=steps, step_s=sum(parts.values()) if steps else 0.0,
                     num_workers=draw.choice([None, 0, 3]), cpu_share=draw.choice([None, draw.random()]),
                     preemptions_per_s=draw.choice([None, 100.0]), host=draw.choice(["one", "two"]),
                     facts=draw.choice([{}, {"cores": 2, "threads": 2}]), first_step=draw.choice([None, 30.0]))
            )  # fmt: skip
        run = measured(
            *ranks, end=draw.choice(["well", "failed", "stopped", "killed", "running"]),
            loss=tuple((i, draw.choice([1.0, math.nan, -1.0, 0.0])) for i in range(draw.choice([0, 1, 50]))),
            lateness=tuple(Lateness(draw.randint(0, 5), 499, draw.random()) for _ in range(2)),
            throughput=tuple((i, draw.random()) for i in range(draw.choice([0, 1, 2, 30]))),
        )  # fmt: skip
        for finding in find(run):
            assert finding.text[0] == finding.text[0].upper()
            assert finding.text.endswith((".", "?"))
            assert "nan" not in finding.text


def test_the_failure_that_ended_the_job_is_named_and_not_one_before_a_restart():
    events = (
        RunEvent(1.0, "failure", "ValueError: the first", 1, ""),
        RunEvent(2.0, "restart", "all ranks are restarted", None, ""),
        RunEvent(3.0, "failure", "KeyError: the last", 0, ""),
    )
    told = " ".join(texts(dataclasses.replace(measured(rank(0), rank(1)), events=events, end="failed")))
    assert "Rank 0 failed first: KeyError: the last" in told
    assert "the first" not in told


def test_a_host_whose_loss_ended_the_job_was_not_survived():
    """Its ranks were lost, and "the others continued"."""
    events = tuple(RunEvent(1.0, "host lost", "lost with b", number, "") for number in (2, 3))
    told = " ".join(texts(dataclasses.replace(measured(rank(0), rank(1)), events=events, end="failed")))
    assert "Ranks 2, 3 were lost, which ended the job: lost with b." in told
    assert "continued" not in told


def test_the_memory_of_the_others_is_theirs():
    ranks = [rank(0, peak_bytes=GIB), rank(1, peak_bytes=4 * GIB)]
    told = " ".join(texts(measured(*ranks)))
    assert "Rank 1 uses 4.00 GiB of memory, and the median of the others is 1.00 GiB" in told
