"""Memory is given back after much was sent, and not after little."""

from phalanx._job.coordinator import service
from phalanx._job.coordinator.service import UnusedMemory


def test_memory_is_given_back_once_after_a_burst(monkeypatch):
    """What answers to a thousand hosts had taken stayed with the first host's agent for the rest of the job."""
    calls = []
    memory = UnusedMemory()
    monkeypatch.setattr(service, "release_freed_memory", lambda: calls.append(0))
    memory.note_sent(1 << 20)
    memory.give_back()
    assert calls == []
    for _ in range(16):
        memory.note_sent(1 << 20)
    memory.give_back()
    memory.give_back()
    assert calls == [0]


def test_memory_can_be_given_back_by_the_c_library_of_this_system():
    memory = UnusedMemory()
    memory.note_sent(1 << 30)
    memory.give_back()
