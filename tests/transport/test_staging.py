"""What a device still reads or writes is not given to others: on a stream that gets on when the test says so."""

import contextlib

import pytest
import torch

from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.staging import HostMemory, StagedCall, open_copy_stream
from phalanx._comm.transport.staging.host_memory import block_bytes, staging_bytes
from phalanx._comm.transport.staging.staged_call import StagedTensors

CTX = CallContext(1.0, 0)
LARGE = 1 << 16


class ByHand:
    """A stream that is never over before `finish`."""

    def __init__(self):
        self.marks, self.finished, self.said = 0, 0, []

    future_devices = ()

    def follow_caller(self):
        self.said.append("follow")

    def queueing(self):
        return contextlib.nullcontext()

    def mark(self):
        self.marks += 1
        return self.marks

    def finish(self):
        self.finished = self.marks

    def drain(self, patience_s):
        return self.finished == self.marks

    def keep(self, tensor):
        self.said.append("keep")

    def await_on_host(self, mark):
        self.said.append(f"host awaits {mark}")

    def is_over(self, mark):
        return mark <= self.finished

    def await_on_device(self, mark):
        self.said.append(f"device awaits {mark}")


@pytest.fixture
def memory():
    return HostMemory("sim", torch.empty(1 << 20, dtype=torch.uint8))


def test_blocks_are_whole_pages_and_serve_again(memory) -> None:
    assert [block_bytes(n) for n in (1, 4096, 4097, 1 << 20)] == [4096, 4096, 8192, 1 << 20]
    assert staging_bytes(1 << 30) == 1 << 27
    first = memory.empty((2 * LARGE,), torch.uint8)
    at = first.data_ptr()
    assert at % 4096 == 0
    assert memory.empty((LARGE // 2, 1), torch.float32).shape == (LARGE // 2, 1)
    del first
    assert memory.empty((2 * LARGE - 1,), torch.uint8).data_ptr() == at
    memory.close()
    assert memory.empty((LARGE,), torch.uint8).numel() == LARGE  # ordinary memory from here on


def test_what_is_copied_back_is_kept_until_the_device_has_read_it(memory) -> None:
    stream = ByHand()
    in_flight = StagedTensors(stream)
    call = StagedCall(stream, memory, in_flight)
    tensor = torch.ones(LARGE)
    host = call.stage(tensor, read=True, written=True)
    at = host.data_ptr()
    call.around(lambda ctx, tensor=host: tensor.mul_(2))(CTX)
    call.order_caller()
    assert tensor.eq(2).all()
    assert stream.said == ["follow", "keep", "host awaits 1", "keep", "device awaits 2"]
    del host
    assert memory.empty((LARGE,), torch.float32).data_ptr() != at
    stream.finish()
    in_flight.hold(stream.mark(), [])
    held = [memory.empty((LARGE,), torch.float32) for _ in range(2)]
    assert at in {tensor.data_ptr() for tensor in held}


def test_a_call_that_is_refused_keeps_its_memory_until_the_device_has_written_it(memory) -> None:
    """The next call got the block while the refused one's copy was still to come, which overwrote its result."""
    stream = ByHand()
    in_flight = StagedTensors(stream)
    call = StagedCall(stream, memory, in_flight)
    at = call.stage(torch.ones(LARGE), read=True, written=True).data_ptr()
    call.abandon()
    assert call.outputs == []
    assert memory.empty((LARGE,), torch.float32).data_ptr() != at


def test_an_operation_that_fails_copies_nothing_back(memory) -> None:
    call = StagedCall(
        open_copy_stream(torch.device("cpu")), memory, StagedTensors(open_copy_stream(torch.device("cpu")))
    )
    tensor = torch.ones(LARGE)
    host = call.stage(tensor, read=True, written=True)

    def fail(ctx):
        host.zero_()
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        call.around(fail)(CTX)
    assert tensor.eq(1).all()
