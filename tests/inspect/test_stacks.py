"""Finding the job, explaining silence, and an agent that does not answer as it should."""

import os
import signal
import socket
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel
from phalanx._comm.diagnostics.observer import GroupInfo, GroupLog, RankLog
from phalanx._job.inspect.stacks import jobs
from phalanx._job.inspect.stacks.job_snapshot import JobSnapshot, answer, ask
from phalanx._job.inspect.stacks.jobs import RunningJob, choose_job, describe_command, find_jobs, is_called, parse_names
from phalanx._job.inspect.stacks.report import ask_ranks, decide_silence, explain_silence, format_report
from phalanx.errors import LaunchError

SNAPSHOT = JobSnapshot(7, "train.py", 3, 8, ((0, 100), (2, 102)), (GroupInfo("dp", 3, (0, 1, 2), (100, 101, 102)),))
HANDLED = f"{1 << (signal.SIGURG - 1):016x}"
STATUS = {"PPid": "8", "State": "S (sleeping)", "SigCgt": HANDLED, "SigBlk": "0"}


def test_jobs_are_found_by_the_names_of_their_sockets():
    names = [
        "@phalanx-agent-12-ab",
        "@phalanx-agent-7-cd",
        "@phalanx-0123",
        "/run/phalanx-agent-9-ef",
        "@phalanx-agent-x-y",
    ]
    assert parse_names(names) == [RunningJob(7, "phalanx-agent-7-cd"), RunningJob(12, "phalanx-agent-12-ab")]
    assert all(job.pid != 1 for job in find_jobs())


@pytest.mark.parametrize("command", ["phalanx stacks", "phalanx top"])
def test_the_only_job_needs_no_number_and_of_several_one_must_be_chosen(monkeypatch, command):
    one, two = RunningJob(7 << 40, "a"), RunningJob(12 << 40, "b")
    running = []
    monkeypatch.setattr(jobs, "find_jobs", lambda command: running)
    monkeypatch.setattr(jobs, "describe_command", {one.pid: "train.py", two.pid: ""}.get)
    with pytest.raises(LaunchError, match=rf"^{command}: no job of yours is running on this host \(started by"):
        choose_job(None, command)
    with pytest.raises(LaunchError, match=r"3 is not the pid .*No job of yours is running"):
        choose_job("3", command)
    running.append(one)
    assert choose_job(None, command) == one
    with pytest.raises(LaunchError, match=rf"Your running jobs:\n  {one.pid}"):
        choose_job("3", command)
    with pytest.raises(LaunchError, match=r"on this host is called rain\. Your running jobs:"):
        choose_job("rain", command)
    running.append(two)
    assert choose_job(str(two.pid), command) == two
    with pytest.raises(
        LaunchError, match=rf"several jobs are running; choose one:\n  {one.pid}  train.py\n  {two.pid}$"
    ):
        choose_job(None, command)


def test_a_job_is_called_by_its_script():
    for name in ("/data/train.py", "train.py", "train"):
        assert is_called("/data/train.py", name)
    assert not is_called("/data/train.py", "rain")


def test_a_name_that_holds_a_new_line_forges_no_line():
    """A script that was called so put a rank into the report that there was not."""
    snapshot = replace(SNAPSHOT, target="train.py\n\nrank 9 (pid 1)\n  nothing\x1b[2J")
    lines = format_report(snapshot, [], {0: "a", 2: "b"}, 0).split("\n")
    assert lines[0].startswith("Job 7: train.py\\n\\nrank 9 (pid 1)\\n  nothing\\x1b[2J, 2 of 3 ranks")
    assert [line for line in lines if line.startswith("rank")] == ["rank 0 (pid 100)", "rank 2 (pid 102)"]


def test_the_words_of_a_command_are_one_line():
    with subprocess.Popen(
        ["tail", "-f", "/dev/null", "--", "600\n  1  init\x1b[2J"], stderr=subprocess.DEVNULL
    ) as waiting:
        try:
            while "tail" not in (words := describe_command(waiting.pid)):
                assert waiting.poll() is None
        finally:
            waiting.kill()
    assert words == "tail -f /dev/null -- 600\\n  1  init\\x1b[2J"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"State": "T (stopped)"}, "is stopped"),
        ({"State": "Z (zombie)"}, "has just ended"),
        ({"PPid": "1"}, "has just ended"),
        ({"SigCgt": "0"}, "it has no handler for SIGURG"),
    ],
)
def test_a_rank_that_could_not_answer_is_not_asked(change, words):
    assert words in decide_silence({**STATUS, **change}, (8,))


def test_the_silence_of_a_rank_that_was_asked_is_explained():
    assert decide_silence(STATUS, (8,)) is None
    assert decide_silence({}, (8,)) == "has just ended"
    assert "cannot be interrupted" in explain_silence({**STATUS, "State": "D (disk sleep)"})
    assert "blocks SIGURG" in explain_silence({**STATUS, "SigBlk": HANDLED})
    assert "its own handler" in explain_silence(STATUS)
    assert explain_silence({}) == "has just ended"


def test_a_process_that_is_no_child_of_the_zygote_is_never_sent_a_signal():
    fd = os.memfd_create("stacks")
    try:
        assert ask_ranks([(0, os.getpid())], [fd], parents=(1 << 30,)) == {0: "has just ended"}
    finally:
        os.close(fd)
    assert ask_ranks([], [], (1,)) == {}


@pytest.fixture
def listener():
    with listen(f"phalanx-test-snapshot-{os.getpid()}", 8) as sock:
        yield sock


def test_an_agent_that_does_not_answer_is_given_up(listener):
    name = listener.getsockname()[1:].decode()
    with pytest.raises(LaunchError, match=r"does not answer within 0\.05 s.*Ctrl-Z"), ask(name, os.getpid(), 0.05):
        pass
    with pytest.raises(LaunchError, match="another process answers at its address"), ask(name, 1, 1.0):
        pass
    with pytest.raises(LaunchError, match="cannot be reached: Connection refused"), ask("phalanx-nobody", 1, 1.0):
        pass


def test_what_the_agent_says_arrives_with_more_descriptors_than_a_message_holds():
    ranks = tuple((rank, 100 + rank) for rank in range(150))
    snapshot = JobSnapshot(7, "train.py", 150, 8, ranks, SNAPSHOT.groups)
    fd = os.memfd_create("x")
    ours, theirs = socket.socketpair()
    from phalanx._job.inspect.stacks import job_snapshot as module

    received: list[int] = []
    try:
        with closing(Channel(ours, max_fds=64)) as command, closing(Channel(theirs)) as agent:
            answer(agent, snapshot, [fd] * 150, [fd])
            assert module._receive(command, received, Deadline.after(60)) == snapshot
        assert len(received) == 152
    finally:
        for number in (*received, fd):
            os.close(number)


def test_the_report_shows_each_living_rank_with_its_operations_and_its_stack():
    group = GroupLog("dp", 3, tuple(RankLog(r, 100 + r, True, False, "", ()) for r in range(3)))
    text = format_report(SNAPSHOT, [group], {0: "Thread 1:\n  File a", 2: "is stopped"}, 0)
    assert text.splitlines()[:9] == [
        "Job 7: train.py, 2 of 3 ranks running",
        "",
        "rank 0 (pid 100)",
        "  group 'dp': has called nothing yet",
        "  Thread 1:",
        "    File a",
        "",
        "rank 2 (pid 102)",
        "  group 'dp': has called nothing yet",
    ]
