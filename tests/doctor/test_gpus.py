"""What the doctor says of GPUs, asked through a library with NVML's names; and its judgement of hosts not at hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace

from tests.fake_nvml import build_nvml

from phalanx._tools.doctor.checks import CheckStatus, run_checks, run_gpu_checks
from phalanx._tools.doctor.driver import query_driver
from phalanx._tools.doctor.facts import DoctorFacts, Driver, Gpu, Kernel, MachineFacts, Probe, Torch

CUDA = Torch(
    "2.13.0+cu130",
    ("gloo", "nccl"),
    True,
    "13.0",
    Probe(True, "1 devices"),
    "2.28.3",
    Probe(True, "20.0 GB/s to the GPU"),
)
GPU = Gpu("H100", "GPU-1", False, False, 345, 1980)
FACTS = DoctorFacts(
    "0.1.0",
    MachineFacts("linux", "3.12", 16, 16),
    Kernel(Probe(True)),
    CUDA,
    Probe(True, "trained"),
    Driver(Probe(True), "580.1", "13.0", (GPU,)),
)


def _warnings(facts):
    return {
        found.topic: f"{found.fact} -> {found.advice}"
        for found in run_gpu_checks(facts)
        if found.status != CheckStatus.OK
    }


def _ask(tmp_path, **variables):
    env = {**os.environ, **build_nvml(tmp_path), **variables}
    command = [sys.executable, "-m", "phalanx._tools.doctor.driver"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def test_the_driver_tells_what_its_gpus_are(tmp_path) -> None:
    said = _ask(tmp_path, FAKE_GPUS="2", FAKE_MIG="1", FAKE_THROTTLE="37", FAKE_P2P="1", FAKE_COMPUTE_MODE="3")
    assert said["nvml"]["works"]
    assert (said["version"], said["cuda"], said["apart"]) == ("580.159.04", "13.0", [[0, 1]])
    assert said["gpus"] == [
        {
            "name": "Fake H100",
            "uuid": f"GPU-fake-{index}",
            "mig": True,
            "exclusive": True,
            "clock_mhz": 345,
            "max_clock_mhz": 1980,
            "slowed_by": ["its power limit", "heat"],
        }
        for index in range(2)
    ]


def test_a_driver_that_is_not_loaded_is_told(tmp_path) -> None:
    said = _ask(tmp_path, FAKE_NVML_ERROR="9")
    assert said["nvml"] == {"works": False, "detail": "NVML failed: Driver Not Loaded"}
    [found] = run_gpu_checks(replace(FACTS, driver=Driver(Probe(**said["nvml"]))))
    assert found.status is CheckStatus.WARNING
    assert "Driver Not Loaded" in found.fact
    assert "nvidia-smi must answer" in found.advice


def test_asking_never_fails_and_a_host_without_a_driver_hears_nothing_of_gpus() -> None:
    assert isinstance(query_driver(), Driver)
    assert query_driver(python="/nowhere/python").gpus == ()
    assert run_gpu_checks(replace(FACTS, driver=Driver())) == []


def test_a_host_in_order_is_told_so_and_its_training_last() -> None:
    assert _warnings(FACTS) == {}
    findings = run_checks(FACTS)
    assert [found.topic for found in findings][-2:] == ["GPU clocks", "training"]
    assert "580.1 for CUDA 13.0" in [found.fact for found in findings]


def test_each_obstacle_is_named_with_what_to_do() -> None:
    bad = Gpu("H100", "GPU-2", True, False, 345, 1980, ("heat",))
    driver = replace(FACTS.driver, gpus=(GPU, bad), apart=((0, 1),))
    torch = replace(CUDA, nccl="", pinned=Probe(False, "RuntimeError: no"))
    warnings = _warnings(replace(FACTS, driver=driver, torch=torch))
    for topic, words in {
        "NCCL": "install an official build",
        "GPU peers": "no peer access between GPUs 0-1",
        "GPU sharing": "MIG is on for GPU 1",
        "page-locked": "ulimit -l",
        "GPU clocks": "GPU 1 is slowed down by heat",
    }.items():
        assert words in warnings[topic]
    closed = replace(FACTS, driver=replace(FACTS.driver, gpus=(replace(GPU, exclusive=True),)))
    assert "accepts one process at a time" in _warnings(closed)["GPU sharing"]
