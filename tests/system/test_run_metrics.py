"""`phalanx run --metrics`: a scraper reads what `phalanx top` shows, and nobody else does."""

import contextlib
import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.system.phalanx_command import BATCHES, Running, run, start, write_script

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

SCRIPT = f"""
import os, sys, torch, torch.distributed as dist, phalanx
phalanx.init()
{BATCHES}
for number, x in enumerate(phalanx.progress(batches(), total=1_000_000, live=False)):
    if number == 20:
        print("running", flush=True)
"""
METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def scrape(address: str, **headers: str) -> str:
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


def test_a_scraper_reads_the_running_job(tmp_path: Path) -> None:
    over = tmp_path / "over"
    words = ("run", "--metrics", ":0", "--nproc-per-node", "2", write_script(tmp_path, SCRIPT), str(over))
    with start(*words, stderr=subprocess.STDOUT) as running:
        address = running.read_until("metrics at").split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
        running.read_until_all("running", 2)
        first = scrape(address)
        second = scrape(address)
        over.touch()
        finished = running.finish()
    assert finished.code == 0, finished.out
    values = {(name, labels): float(value) for name, labels, value in METRIC.findall(second)}
    host = os.uname().nodename
    assert values["phalanx_world_size", ""] == 2
    assert values["phalanx_ranks_running", ""] == 2
    assert values["phalanx_restarts_total", ""] == 0
    assert values["phalanx_ranks_lost_total", ""] == 0
    assert values["phalanx_step", ""] >= 20
    for rank in (0, 1):
        labels = f'rank="{rank}",host="{host}"'
        assert values["phalanx_rank_step", labels] >= 20
        assert values["phalanx_rank_memory_bytes", labels] > 0
        parts = ("computing", "idle", "computing_or_idle", "waiting", "communicating")
        # Who is idle is known where a processor's time was seen to pass between two looks.
        shares = [values.get(("phalanx_rank_time_ratio", f'{labels},part="{part}"'), 0.0) for part in parts]
        assert sum(shares) == pytest.approx(1)
    parser = pytest.importorskip("prometheus_client.parser")
    for text in (first, second):
        families = list(parser.text_string_to_metric_families(text))
        assert {family.name for family in families} >= {"phalanx_world_size", "phalanx_restarts", "phalanx_rank_step"}
        assert all(family.type in ("gauge", "counter") and family.documentation for family in families)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.0.0.0:0", "--metrics 0.0.0.0:0: other hosts can reach 0.0.0.0, so a token is required. Set "),
        ("9400", "must be :PORT or HOST:PORT, got '9400'"),
        (":99999", "must be a port number, from 0 to 65535, got '99999'"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_rank_starts(tmp_path: Path, given: str, message: str) -> None:
    finished = run("--metrics", given, "--nproc-per-node", "1", write_script(tmp_path, "print('started')"))
    assert finished.code == 2
    assert message in finished.err
    assert "started" not in finished.out


@pytest.mark.slow
def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finished = run("--metrics", f":{port}", "--nproc-per-node", "1", write_script(tmp_path, ""))
    assert finished.code == 2
    assert f"--metrics 127.0.0.1:{port}: Address already in use" in finished.err


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_host_that_joins_serves_them_as_the_first_one_does_or_as_it_is_told(tmp_path: Path) -> None:
    """`phalanx join` had no such option, and served none. A port that is taken there is no reason not to take part."""
    over = tmp_path / "over"
    script = write_script(
        tmp_path, "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\n"
    )
    with hosts(1) as (machine,), contextlib.ExitStack() as stack:
        at = f"{machine.address}:29477"

        def begin(*words: str) -> Running:
            environ = {"PHALANX_KEY": str(Key(bytes(32)))}
            command = start(*words, env=environ, before=machine.command, stderr=subprocess.STDOUT)
            return stack.enter_context(command)

        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", at)
        first = begin("run", "--nnodes", "3", *where, "--metrics", ":9477", script, str(over))
        first.read_until("metrics at http://127.0.0.1:9477/metrics")
        third = begin("join", at)
        third.read_until("--metrics 127.0.0.1:9477: Address already in use. This host serves no metrics.")
        second = begin("join", at, "--metrics", ":0")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", second.read_until("metrics at").split()[-1])
        over.touch()
        assert [job.finish().code for job in (first, second, third)] == [0, 0, 0]
