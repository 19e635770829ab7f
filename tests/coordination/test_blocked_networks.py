"""From where connections fail again and again is not heard for a while."""

from phalanx.coordination import blocked_networks
from phalanx.coordination.blocked_networks import BLOCKED_S, FAILURES, BlockedNetworks


def fail(blocked, network, number, now):
    return [blocked.note_failure(network, now) for _ in range(number)]


def test_a_network_is_blocked_by_so_many_failures_and_heard_again_later():
    blocked = BlockedNetworks()
    assert not any(fail(blocked, "a", FAILURES - 1, 0.0))
    assert fail(blocked, "a", 2, 9.0) == [True, False]
    assert (blocked.networks, len(blocked)) == (["a"], 1)
    assert not blocked.expire(9.0 + BLOCKED_S - 0.1)
    assert blocked.expire(9.0 + BLOCKED_S)
    assert blocked.networks == []
    assert not any(fail(blocked, "a", FAILURES - 1, 30.0))  # it is counted anew
    assert fail(blocked, "a", 1, 30.0) == [True]


def test_failures_of_long_ago_do_not_count():
    blocked = BlockedNetworks()
    for now in range(0, 500, 11):
        assert not any(fail(blocked, "a", FAILURES - 1, float(now)))


def test_a_network_from_which_a_member_has_come_is_never_blocked():
    """Users of a member's host, and of others behind one address with it, would keep that member out."""
    blocked = BlockedNetworks()
    fail(blocked, "a", FAILURES - 1, 0.0)
    blocked.note_member("a")
    assert not any(fail(blocked, "a", 10 * FAILURES, 0.0))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(blocked_networks, "_MOST_KNOWN", 10)
    monkeypatch.setattr(blocked_networks, "_MOST_BLOCKED", 5)
    blocked = BlockedNetworks()
    for number in range(100):
        blocked.note_member(f"member {number}")
        fail(blocked, f"stranger {number}", FAILURES - 1, 0.0)
    assert (len(blocked._members), len(blocked._failures)) == (10, 10)
    for number in range(90, 100):
        fail(blocked, f"stranger {number}", 1, 0.0)
    assert blocked.networks == [f"stranger {number}" for number in range(95, 100)]
