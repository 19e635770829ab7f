"""`phalanx bench link` as people start it: by a launcher, once on each host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import phalanx
from phalanx.collectives import Link
from phalanx.testing import hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
RATE = 100e6 / 8  # bytes a second


def _start(machine, number, *words):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        f"--node-rank={number}",
    ]
    place = ["--master-addr=10.77.0.1", "--master-port=29517", "-m", "phalanx", "bench", "link", *words]
    return subprocess.Popen(
        [*launcher, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=machine.enter
    )


@pytest.mark.slow
def test_the_link_between_two_hosts_is_measured_and_told_as_an_option():
    with hosts(2, rate="100mbit") as machines:
        started = [_start(machine, i, "--rounds=3", "--json") for i, machine in enumerate(machines)]
        ended = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(map("\n".join, ended))
    assert ended[1][0] == ""
    told = json.loads(ended[0][0])
    (link,) = told["links"]
    assert [name.partition("(")[2] for name in link["hosts"]] == ["10.77.0.1)", "10.77.0.2)"]
    assert 0 < link["bytes_per_s"] < 1.2 * RATE, "faster than the link is"
    assert link["latency_s"] == link["seconds"]["8"] > 0
    assert link["seconds"]["8388608"] > 8388608 / (1.2 * RATE)
    options = eval(told["options"], {"phalanx": phalanx})
    assert options.link == Link(float(f"{link['latency_s']:.2g}"), float(f"{link['bytes_per_s']:.3g}"))


def test_without_a_launcher_it_says_how_to_start_it():
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "bench", "link"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "phalanx run --nnodes 2 --nproc-per-node 1 -m phalanx bench link" in ended.stderr
