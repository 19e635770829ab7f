"""TF_CONFIG says who is who, as for MultiWorkerMirroredStrategy of tf.distribute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import strategies
from phalanx._comm.control.key import Key
from phalanx.strategies.tf_config import Cluster, read_tf_config
from phalanx.testing import hosts, why_no_hosts

TWO = ["10.0.0.1:5000", "10.0.0.2:5000"]


def read(cluster, kind="worker", index=0):
    text = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    return read_tf_config("Test", text)


def test_workers_are_hosts_and_a_chief_is_the_first():
    assert read({"worker": TWO}, index=1) == Cluster(tuple(TWO), 1)
    assert read({"worker": TWO, "chief": ["10.0.0.9:1"]}, index=1) == Cluster(("10.0.0.9:1", *TWO), 2)
    assert read({"worker": TWO, "chief": ["10.0.0.9:1"]}, "chief").index == 0
    assert read({"worker": TWO, "evaluator": ["a:1"]}, index="1").index == 1  # the field writes numbers as text, too
    options = Cluster(("[fd77::1]:5000", "b:1"), 1).run_options()
    assert options == ("--nnodes", "2", "--node-rank", "1", "--master-addr", "fd77::1", "--master-port", "5000")


def test_without_a_cluster_of_several_there_is_nothing_to_find():
    assert read_tf_config("Test", "") is None
    assert read_tf_config("Test", "{}") is None
    assert read({"worker": ["a:1"]}) is None


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "words"),
    [
        ({"worker": TWO, "ps": ["a:1"]}, "worker", 0, "it has tasks 'ps': .* take ParameterServerStrategy"),
        ({"worker": TWO}, "evaluator", 0, "this task is the evaluator, which does not train"),
        ({"worker": TWO}, "worker", 2, "task.index 2 is none of the 2 of 'worker'"),
        ({"worker": TWO}, "master", 0, "task.type must be 'chief' or 'worker', got 'master'"),
        ({"worker": ["a", "b:c"]}, "worker", 0, "'a' is not 'host:port'; 'b:c' is not 'host:port'"),
        ({"worker": "a:1"}, "worker", 0, "'worker' must be a list of 'host:port'"),
        ({"chief": TWO, "boss": []}, "chief", 0, "there are no tasks 'boss', .*; there is one chief at most"),
    ],
)
def test_what_has_no_meaning_here_is_refused(cluster, kind, index, words):
    with pytest.raises(ValueError, match=f"Test: TF_CONFIG: .*{words}"):
        read(cluster, kind, index)


def test_what_is_no_configuration_is_refused(monkeypatch):
    for text, words in (("{", "TF_CONFIG is not JSON"), ("[]", "must be an object with a 'cluster' and a 'task'")):
        with pytest.raises(ValueError, match=words):
            read_tf_config("Test", text)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(ValueError, match="TF_CONFIG is set, which this strategy does not read"):
        strategies.ParameterServerStrategy()


def test_hosts_that_may_not_start_their_ranks_do_not_train_alone_without_a_word(monkeypatch):
    """With launch=False each host was one replica, the main one, whatever TF_CONFIG said of others."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 1}}))
    with pytest.raises(ValueError, match=r"TF_CONFIG has 2 tasks, and with launch=False .* `phalanx run --nnodes 2 "):
        strategies.MultiWorkerMirroredStrategy(launch=False)


TRAIN = """
from phalanx import strategies
strategy = strategies.get("auto", devices=1)
total = strategy.reduce("sum", strategy.replica_id_in_sync_group + 1)
print(type(strategy).__name__, strategy.num_replicas_in_sync, total, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_plain_script_on_each_host_becomes_one_job(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    with hosts(2) as machines:
        cluster = {"worker": [f"{machine.address}:29488" for machine in machines]}
        running = [
            subprocess.Popen(
                [*machine.command, sys.executable, "train.py"],
                cwd=tmp_path,
                env={
                    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": number}}),
                    "PHALANX_KEY": str(Key(bytes(32))),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, machine in enumerate(machines)
        ]
        said = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert "MultiWorkerMirroredStrategy 2 3" in said[0], said  # where the first host shows all ranks
