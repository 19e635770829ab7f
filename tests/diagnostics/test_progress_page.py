"""A rank counts its steps in a page of memory; whoever has the page reads how far it is, whatever the rank is doing."""

import os
from contextlib import closing

import pytest

from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel
from phalanx._comm.diagnostics import progress_page
from phalanx._comm.diagnostics.progress_page import PAGE_BYTES, ProgressPage, open_page, parse_page, read_page
from phalanx._job.agent.attempt import Pages


def new_page():
    memory = bytearray(PAGE_BYTES)
    return ProgressPage(memory), memory


def read(memory):
    return parse_page(bytes(memory))


@pytest.mark.parametrize("steps", [1, 2, 61, 62, 63, 64, 65, 1000])
def test_the_last_steps_can_be_read_with_their_times_and_samples(steps):
    page, memory = new_page()
    loop = page.begin_loop(5000)
    for _ in range(steps):
        page.count(loop, 32)
    track = read(memory).loop
    assert (track.steps, track.total_steps, track.samples) == (steps, 5000, 32 * steps)
    times, samples = zip(*track.recent, strict=True)
    assert list(times) == sorted(times)
    assert list(samples) == [32 * step for step in range(max(0, steps - 62), steps + 1)]


def test_of_loops_inside_each_other_the_innermost_counts_and_a_new_one_begins_at_nothing():
    page, memory = new_page()
    epochs = page.begin_loop(10)
    for _ in range(3):
        batches = page.begin_loop(None)
        assert read(memory).loop.steps == 0
        for _ in range(5):
            page.count(batches, 8)
        page.count(epochs, 1)
        track = read(memory).loop
        assert (track.steps, track.total_steps, track.samples) == (5, None, 40)


def test_what_state_commits_stands_beside_the_loop_and_may_go_back():
    page, memory = new_page()
    assert read(memory) == progress_page.RankProgress(0, None, None)
    for step in (500, 501, 502, 501):  # a step is lost with a rank, and done again
        page.commit(step, 16)
    page.set_generation(1)
    said = read(memory)
    assert said.loop is None
    assert said.generation == 1
    assert (said.state.steps, said.state.samples) == (501, 64)
    assert [samples for _, samples in said.state.recent][-1] == 64


def test_a_page_of_another_version_is_none():
    assert parse_page(bytes(PAGE_BYTES)) is None
    assert parse_page(b"short") is None
    assert read_page(-1) is None


@pytest.fixture
def agent():
    name = f"phalanx-test-page-{os.getpid()}"
    with listen(name, 1) as listener:
        listener.settimeout(30)
        yield listener, f"{name}:token"


@pytest.fixture
def no_page_yet(monkeypatch):
    monkeypatch.setattr(progress_page, "_own", None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)


@pytest.mark.usefixtures("no_page_yet")
def test_the_page_that_the_agent_is_given_says_from_the_first_moment_what_it_is(agent):
    """The agent looks at what it is given at once. A page was shown before its first word was written, and dropped."""
    listener, address = agent
    page = open_page(address)
    assert open_page(address) is page
    connection, _ = listener.accept()
    with closing(Channel(connection)) as channel:
        (message,) = channel.receive_available()
    assert message.content == {"kind": "progress page", "token": "token"}
    pages = Pages()
    try:
        pages.add(4711, message.fds)
        assert pages.read(4711) == progress_page.RankProgress(0, None, None)
        page.commit(7)
        assert pages.read(4711).state.steps == 7
        assert set(pages.fds_of([4711, 4712])) == {4711}
        assert pages.read(4712) is None
    finally:
        pages.close()
        page._words.release()
        page._memory.close()


@pytest.mark.usefixtures("no_page_yet")
def test_without_an_agent_the_page_is_there_and_nobody_reads_it():
    open_page("").commit(1)


@pytest.mark.usefixtures("no_page_yet")
def test_an_agent_that_has_gone_is_no_error():
    open_page("phalanx-nobody:token").commit(1)


def test_the_newest_page_of_a_process_counts_and_what_is_none_is_let_go():
    pages = Pages()
    first, second, wrong = (os.memfd_create("page") for _ in range(3))
    page, memory = new_page()
    page.commit(1)
    os.write(first, memory)
    page.commit(2)
    os.write(second, memory)
    pages.add(1, [first])
    pages.add(1, [second])
    pages.add(2, [wrong])
    pages.add(3, [])
    assert pages.read(1).state.steps == 2
    assert pages.read(2) is None
    for fd in (first, wrong):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    pages.close()
