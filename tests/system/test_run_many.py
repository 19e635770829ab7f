"""More ranks than a socket between agent and zygote can hold commands for."""

import resource
import signal
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, start

# As `python -m phalanx.cli`, without the limit of 64 ranks per core: so many ranks are a normal job of a large host.
UNLIMITED = """
import sys
from phalanx._job.launch import plan_job
from phalanx.cli.__main__ import main
plan_job._RANKS_PER_CORE = 1000
main()
"""
MANY = ("run", "--nproc-per-node", "400", "--shutdown-timeout", "600", "--no-python")


@pytest.mark.slow
def test_400_ranks_start_and_end() -> None:
    # The agent told the zygote of all ranks before it read what the zygote said of the first: from about 240 ranks on
    # both waited in a full socket, for each other, and only SIGKILL helped.
    with start(*MANY, "true", python=("-c", UNLIMITED)) as running:
        finished = running.finish()
        assert (finished.code, finished.out, finished.err) == (0, "", "")
        assert running.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_of_many_ranks_can_be_interrupted(number: int) -> None:
    program = ("sh", "-c", "echo here; exec sleep 600")
    with start(*MANY, *program, python=("-c", UNLIMITED)) as running:
        running.read_until("here")
        running.process.send_signal(number)
        assert running.finish().code == 128 + number
        assert running.survivors() == []


@pytest.mark.slow
def test_after_a_failure_no_further_ranks_are_started(tmp_path: Path) -> None:
    with start(*MANY, "sh", "-c", "exit 3", python=("-c", UNLIMITED)) as running:
        finished = running.finish()
    assert finished.code == 3
    assert ": not started" in finished.err or "ranks 1-399: exit code 3" in finished.err


def with_limit(kind: int, soft: int, hard: int) -> tuple[str, ...]:
    return ("-c", f"import resource\nresource.setrlimit({kind}, ({soft}, {hard}))\n{UNLIMITED}")


@pytest.mark.slow
def test_few_open_files_are_raised_for_the_agent_and_kept_for_the_ranks() -> None:
    python = with_limit(resource.RLIMIT_NOFILE, 100, 2000)
    with start("run", "--nproc-per-node", "30", "--no-python", "sh", "-c", "ulimit -Sn", python=python) as running:
        finished = running.finish()
    assert finished.code == 0, finished.err
    assert {line.partition("] ")[2] for line in finished.lines} == {"100"}


def test_too_few_open_files_are_told_before_anything_starts() -> None:
    # It was an `OSError: [Errno 24] Too many open files` with the agent's traceback, and half the ranks had started.
    with start(*MANY, "true", python=with_limit(resource.RLIMIT_NOFILE, 300, 300)) as running:
        finished = running.finish()
    assert finished.code == 2
    assert "--nproc-per-node 400: 400 ranks need 1664 open files in this command (RLIMIT_NOFILE)" in finished.err
    assert "and at most 300 are allowed" in finished.err


def test_a_rank_that_the_system_refuses_to_start_is_told_with_the_limit(tmp_path: Path) -> None:
    # The zygote ended with a BlockingIOError, and the agent took it for a lack of memory. The limit on processes holds
    # for no privileged user, hence the call that fails in its place.
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "fork, count = os.fork, [0]\n"
        "def limited():\n"
        "    count[0] += 1\n"
        "    if count[0] > 2: raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return fork()\n"
        "os.fork = limited\n"
    )
    finished = run("--nproc-per-node", "4", "--no-python", "sleep", "600", env={"PYTHONPATH": str(tmp_path)})
    assert finished.code == 1
    assert "phalanx run: rank 2 of 4 could not be started: Resource temporarily unavailable." in finished.err
    assert "`ulimit -u`" in finished.err
    assert "Traceback" not in finished.err
