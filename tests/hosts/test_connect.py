"""A host that waits for the first one says soon why it waits."""

import socket

import pytest

from phalanx._comm.control.key import Key
from phalanx._job.hosts.first_host import connect
from phalanx.errors import LaunchError


@pytest.mark.slow
def test_a_port_where_something_else_listens_is_told_soon_and_at_the_end():
    said = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LaunchError, match=rf"gave up after \d+ s: .*{place}") as refused:
            connect([place], Key.generate(), 7.0, is_over=lambda: False, log=said.append)
    assert len(said) == 1
    assert said[0].startswith(
        f"phalanx run: waiting for the first host. A process listens at {place}, but does not answer"
    )
    assert "ss -ltnp" in said[0]
    assert "ss -ltnp" in str(refused.value)
