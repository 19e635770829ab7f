"""A display names the host of ranks before their lines."""

from __future__ import annotations

import pytest

from phalanx._job.output.display import Display


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
