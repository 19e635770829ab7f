"""`phalanx top --web` on a real job: who gets its page, what stands on it, and that it follows the job, in Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.report.chromium import chromium, find_chromium
from tests.system.hanging import _HANG
from tests.system.phalanx_command import BATCHES, start, write_script

# Rank 1 is the slow one.
_TRAIN = f"""
import os, sys, time, torch, torch.distributed as dist, phalanx
dist.init_process_group("phalanx")
model = phalanx.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{BATCHES}
print("running", flush=True)
for x in phalanx.progress(batches(), total=1_000_000, live=False):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    time.sleep(0.06 if dist.get_rank() == 1 else 0.001)
"""


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`phalanx top --web`, and the address that it prints."""
    command = [sys.executable, "-m", "phalanx.cli", "top", *words, "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.communicate()
        yield process, address
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 0


def read(address: str, path: str = "") -> tuple[int, str]:
    """The status and the text of what is at the address, or at another path with the same token."""
    base, token = address.split("/?")
    try:
        with urllib.request.urlopen(f"{base}/{path}?{token}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_until(address: str, path: str, wanted: str) -> str:
    """The text once `wanted` is in it; the test's own timeout ends the wait."""
    while True:
        status, text = read(address, path)
        assert status == 200, text
        if wanted in text:
            return text


@pytest.mark.slow
def test_a_running_job_and_its_report_so_far_are_a_page_for_who_has_the_token(tmp_path: Path) -> None:
    script, over = write_script(tmp_path, _TRAIN), tmp_path / "over"
    report = tmp_path / "report"
    words = ("run", "--nproc-per-node", "2", "--report", str(report), script, str(over))
    with start(*words, stderr=subprocess.STDOUT) as job:
        job.read_until("running")
        with served(str(job.process.pid)) as (top, address):
            assert "2 of 2 ranks" in read(address)[1]
            now = read_until(address, "now", "Where the time of a step goes")
            assert "<svg" in now
            assert "samples a second" in now
            assert "slowest: rank 1" in read_until(address, "now", "slowest: ")
            seen = json.loads(read(address, "json")[1])
            assert seen["format"] == "phalanx-top"
            assert seen["world_size"] == 2
            assert seen["report"] == str(report)
            assert read(address.split("token=")[0] + "token=wrong")[0] == 403
            assert read(address, "elsewhere")[0] == 404
            over.touch()
            assert job.finish().code == 0
            assert top.wait() == 0
            assert top.stdout is not None
            assert "has ended" in top.stdout.read()


@pytest.mark.slow
def test_a_hang_is_shown_with_who_does_not_come_until_ctrl_c_and_a_port_that_is_taken_is_told(
    tmp_path: Path,
) -> None:
    with start("run", "--nproc-per-node", "2", write_script(tmp_path, _HANG), stderr=subprocess.STDOUT) as job:
        job.read_until("running")
        with served(str(job.process.pid)) as (top, address):
            now = read_until(address, "now", "has not reached")
            assert ">stuck<" in now
            assert re.search(r"rank 0 waits in all_reduce #\d+", now)
            port = address.split(":")[2].split("/")[0]
            words = ["top", str(job.process.pid), "--web", "--port", port]
            second = subprocess.run(
                [sys.executable, "-m", "phalanx.cli", *words], capture_output=True, text=True, check=False
            )
            assert second.returncode == 2
            assert second.stderr == f"phalanx top: --web --port {port}: Address already in use\n"
            top.send_signal(signal.SIGINT)
            assert top.wait() == 0


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
def test_the_page_follows_the_job_in_a_browser(tmp_path: Path) -> None:
    script, over = write_script(tmp_path, _TRAIN), tmp_path / "over"
    with start("run", "--nproc-per-node", "2", script, str(over), stderr=subprocess.STDOUT) as job:
        job.read_until("running")
        with served(str(job.process.pid)) as (top, address), chromium() as browser:
            browser.open(address)
            first = browser.evaluate("document.querySelector('.tiles').textContent")
            while browser.evaluate("document.querySelector('.tiles').textContent") == first:
                os.sched_yield()
            while not browser.evaluate("document.querySelectorAll('svg').length"):
                os.sched_yield()
            assert "rank" in browser.evaluate("document.querySelector('table').textContent")
            assert browser.evaluate("document.querySelector('#said').textContent") == ""
            asked = {
                problem.split("?")[0].rpartition("/")[0] for problem in browser.problems if "favicon" not in problem
            }
            assert asked == {address.split("/?")[0]}, browser.problems
            over.touch()
            job.finish()
            assert top.wait() == 0
            while "does not answer" not in browser.evaluate("document.querySelector('#said').textContent"):
                os.sched_yield()
