"""How the first host opens a job on several hosts: who may come, and from when on it hears of them."""

from __future__ import annotations

import os
import select
from dataclasses import replace
from typing import Any

import pytest

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.hosts import start
from phalanx._job.hosts.control_channel import FIRST, Change
from phalanx._job.hosts.job_spec import KEY
from phalanx._job.launch.command_line import parse
from phalanx._job.launch.plan_job import plan_job


def test_the_first_host_hears_of_one_that_joins_as_soon_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI saw `phalanx run` hang on three hosts: the job spec was there before the first host was a member, and a quick
    one joined in between. It had the first host's number, and the first host, never told of it, awaited it in vain.
    """
    others = []

    class Quick(Client):
        """The first host's; another host comes before it can do anything more."""

        def set(self, key: str, value: Any) -> None:
            super().set(key, value)
            if key == KEY:
                others.append(Client(self.address))
                others[0].join({"kind": "agent", "host": "b"})

    monkeypatch.setattr(start, "Client", Quick)
    settings = parse(["--nnodes", "2", "--rdzv-endpoint", "localhost:0", "--nproc-per-node=1", "--no-python", "true"])
    assert settings is not None
    assert settings.rendezvous is not None
    local = replace(settings.rendezvous, is_local=True)  # in a socket file, and without a key
    plan, notices = plan_job(settings, os.environ), start.Notices()
    opened = start._open_service(plan, local, Key(bytes(32)), notices)
    assert opened is not None
    with opened[0] as service, start._first_member(plan, local, service, notices) as channel:
        (other,) = others
        with other:
            assert channel.member == FIRST
            assert select.select([channel], [], [], 30.0)[0], "the first host was not told"
            assert channel.receive() == [Change("joined", other.member, {"kind": "agent", "host": "b"}, "")]
