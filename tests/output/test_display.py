"""A display names the host of ranks before their lines, and never waits for a terminal."""

from __future__ import annotations

import os
import threading

import pytest

from phalanx._job.output.display import Display, Writer


def test_a_terminal_that_does_not_read_takes_what_fits_and_the_rest_later() -> None:
    """A terminal counts as writable when one byte fits; the agent wrote 4096 and hung, also for Ctrl-C."""
    ours, theirs = os.openpty()
    hang_up = threading.Timer(10.0, os.close, (ours,))  # ends a write that blocks
    hang_up.start()
    writer = Writer(theirs)
    line = b"x" * 79 + b"\n"
    writer.put(1000 * line)
    writer.write_some()
    hang_up.cancel()
    hang_up.join()
    assert writer.waiting
    received = b""
    while received.count(b"\n") < 1000:
        received += os.read(ours, 1 << 16)
        writer.write_some()
    assert received.replace(b"\r\n", b"\n") == 1000 * line
    writer.close()
    os.close(ours)
    os.close(theirs)


def test_ranks_that_begin_again_elsewhere_have_the_name_of_that_host_before_their_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After a restart with other hosts, a line bore the name of the host on which its rank had been before."""
    hosts = {1: "node-b"}
    display = Display(colour=False, terminal=False, host_of=lambda ranks: hosts[min(ranks)])
    display.begin([1])
    display.show(1, 1, [b"one"], b"")
    display.flush()
    hosts[1] = "node-c"
    display.begin([1])
    display.show(1, 1, [b"two"], b"")
    display.flush()
    display.tick()
    assert capfd.readouterr().out.split("\n") == ["[1 node-b] one", "[1 node-c] two", ""]
