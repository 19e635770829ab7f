"""A host that leads a job says so where the job began, once the first host has joined there, and as often as needed."""

import contextlib
import time

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.job_spec import KEY as JOB_SPEC
from phalanx._job.hosts.succession.leader_notice import LeaderNotice, read_notice
from phalanx._job.hosts.succession.moved_job import MOVED_KEY

KEY = Key.generate()


def test_a_notice_does_not_come_before_the_first_host_which_must_be_the_first_member():
    """It took number 0 in the moment between the coordinator's start and the first host's join."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service("127.0.0.1:0", KEY))
        notice = LeaderNotice([str(service.address)], KEY, "127.0.0.1:7")
        stack.callback(notice.close)
        while not service.coordinator.sessions:  # it has come, and does not join
            time.sleep(0.02)
        first = stack.enter_context(Client(service.local))
        assert first.join({"host": "first"}) == 0
        first.set(JOB_SPEC, b"what the job is")
        joined = first.wait_event(60.0)
        assert [event.kind for event in joined][:1] == ["joined"]
        assert b"127.0.0.1:7" in joined[0].body


def test_where_the_job_was_led_before_is_replaced_at_a_host_that_has_gone_on_there():
    """That leader may be lost before this host has joined it, and nobody told this one of the next."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service("127.0.0.1:0", KEY))
        first = stack.enter_context(Client(service.local))
        first.set(MOVED_KEY, "127.0.0.1:6")
        notice = LeaderNotice([str(service.address)], KEY, "127.0.0.1:7")
        stack.callback(notice.close)
        while first.get(MOVED_KEY) != b"127.0.0.1:7":
            time.sleep(0.02)


def test_an_address_that_is_none_is_no_notice():
    assert read_notice({"kind": "leads", "address": "10.0.0.1:29500"}) == "10.0.0.1:29500"
    assert read_notice({"kind": "leads", "address": "nowhere:port"}) == ""
    assert read_notice({"kind": "host", "address": "10.0.0.1:29500"}) == ""
