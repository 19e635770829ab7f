import os

from torch.distributed import FileStore

from phalanx._job.agent.scratch import create_store


def test_the_number_of_a_store_that_is_closed_is_given_to_no_other_file() -> None:
    """A rank's FileStore was collected generations after the agent had closed the store: to count itself out it opened
    the agent's descriptor by its number, which was a pipe by then, and ended the rank ("terminate called after
    throwing an instance of 'c10::DistStoreError', what(): Illegal seek").
    """
    fd = create_store()
    assert fd is not None
    store = FileStore(f"/proc/{os.getpid()}/fd/{fd}", 1)
    store.set("key", "value")
    os.close(fd)
    opened = [end for _ in range(3) for end in os.pipe()]
    another = create_store()
    assert another is not None
    try:
        assert fd not in (*opened, another)
        del store  # the process lives
    finally:
        for number in (*opened, another):
            os.close(number)


def test_stores_go_on_when_their_numbers_are_used_up() -> None:
    opened, numbers = [], set()
    try:
        for _ in range(3000):
            fd = create_store()
            assert fd is not None
            numbers.add(fd)
            opened.append(fd)
            if len(opened) > 3:
                os.close(opened.pop(0))
    finally:
        for fd in opened:
            os.close(fd)
    assert len(numbers) > 100
    assert min(numbers) > 64
