"""A group that ends while threads are inside it: by destroy_process_group, at the end of the process, in a handler.

Its memory was unmapped under the feet of whoever read or wrote it: SIGSEGV in a backward or in point to point. Now
threads are counted in and out, those that wait are woken with an error, and the memory goes with the last of them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

import phalanx
from phalanx._comm.backend.shared_reducer import SharedReducer
from phalanx._comm.diagnostics.flight_recorder import read
from phalanx.errors import ClosedError, PeerLostError, PhalanxError
from phalanx.testing import run_ranks

BIG = 300_000  # larger than a channel: its sender waits until it is read


def _collectives(group, rank, size):
    tensor, parts = torch.ones(70_000), [torch.empty(70_000) for _ in range(size)]
    return [
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.broadcast(tensor, group_src=0, group=group),
        lambda: dist.all_gather(parts, tensor, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.all_reduce(tensor, async_op=True, group=group).wait(),
        lambda: dist.reduce_scatter(tensor, parts, group=group),
        lambda: dist.all_to_all(parts, [tensor] * size, group=group),
    ]


def _messages(group, rank, size):
    peer, data, into = 1 - rank, torch.ones(BIG), torch.empty(BIG)

    def exchange():
        work = dist.isend(data, group_dst=peer, group=group)
        dist.recv(into, group_src=peer, group=group)
        work.wait()

    return [exchange]


def _backward(group, rank, size):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300) for _ in range(3)]
    model = phalanx.DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, check=False)

    def step():
        model.zero_grad()
        model(torch.ones(2, 300)).sum().backward()

    return [step]


@pytest.mark.slow(but=("_collectives",))
@pytest.mark.parametrize("calls", [_collectives, _messages, _backward])
@on_ranks(2)
def test_destroying_a_group_while_a_thread_is_inside_ends_its_operation_and_not_the_process(rank, world_size, calls):
    """The other thread died of SIGSEGV in a backward and in point to point, and a fast all_reduce got a ValueError.

    Over and over a group is destroyed by rank 0's main thread at some moment of a thread that runs operations on it,
    and by rank 1's where it then is.
    """

    def use(actions, begun):
        torch.set_num_threads(1)  # it is a setting of the thread
        try:
            while True:
                for action in actions:
                    action()
                begun.set()
        except (ClosedError, PeerLostError) as error:
            ended.append(error)
        except BaseException as error:
            wrong.append(error)

    ended, wrong = [], []
    for number in range(8):
        group = dist.new_group(timeout=timedelta(seconds=60))
        begun = threading.Event()
        thread = threading.Thread(target=use, args=(calls(group, rank, world_size), begun))
        thread.start()
        begun.wait()
        threading.Event().wait(0.001 * number)  # not for anything: another moment of the other thread's work
        if rank == 0 or number % 2 or calls is _backward:  # who trains would go on without the rank that left
            group.shutdown() if number < 4 else group.abort()  # what destroy_process_group calls
        thread.join()
        dist.destroy_process_group(group)
        dist.barrier()
    assert not wrong, wrong
    assert len(ended) == 8


def test_a_thread_in_a_collective_that_nobody_joins_is_told_when_its_group_is_destroyed(monkeypatch):
    """destroy_process_group waited for the lock that the thread held: the group's whole timeout."""
    from phalanx._comm.backend.process_group import group as process_group

    monkeypatch.setattr(process_group, "_JOIN_S", 0.2)

    def check(rank, world_size):
        errors = []

        def wait():
            try:
                # torch's own `all_reduce` logs an error with the group's backend, and raises another one in its place
                # where the group is no group of torch's any more by then
                group.allreduce([torch.ones(1)]).wait()
            except (ClosedError, PeerLostError) as error:
                errors.append(error)

        group = dist.new_group(timeout=timedelta(hours=1))
        if rank == 0:
            thread = threading.Thread(target=wait)
            thread.start()
            while group._get_sequence_number_for_group() < 1:
                pass
            dist.destroy_process_group(group)
            thread.join()
            assert len(errors) == 1
        dist.barrier()
        if rank == 1:
            with pytest.raises(PeerLostError, match="while its operations were in flight"):
                dist.all_reduce(torch.ones(1), group=group)

    run_ranks(check, 2)


ENDING = """
import json, os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed.fsdp  # DDP's forward imports it: once here, not in every rank
import phalanx

torch.set_num_threads(1)

def fork_ranks(what, how):
    \'\'\'In a rank its number; in the parent what became of both.\'\'\'
    store = dist.FileStore(f"{sys.argv[1]}/{what}-{how}", 2)
    children = []
    for rank in range(2):
        errors = open(f"{sys.argv[1]}/{what}-{how}-{rank}", "w+")
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            dist.init_process_group("phalanx", store=store, rank=rank, world_size=2, timeout=timedelta(hours=1))
            return rank
        children.append((child, errors))
    return [(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (e.seek(0), e.read())[1]) for child, e in children]

told = {}
for what, how in json.loads(sys.argv[2]):
    rank = fork_ranks(what, how)
    if not isinstance(rank, list):
        break
    told[f"{what}-{how}"] = rank
else:
    print(json.dumps(told))
    sys.exit(0)

data, into = torch.ones(300_000), torch.empty(300_000)
if what == "backward":
    model = phalanx.DistributedDataParallel(torch.nn.Linear(300, 300), check=False)
    loss = model(torch.ones(2, 300)).sum()
other = 1 - rank

# In the first four rank 0 waits for what never comes.
def all_reduce():
    dist.all_reduce(data)

def recv():
    dist.recv(into, other)

def send():
    dist.send(data, other)

def backward():
    loss.backward()

def collectives():
    while True:
        dist.all_reduce(data)

def messages():
    while True:
        work = dist.isend(data, other)
        dist.recv(into, other)
        work.wait()

def quiet():
    try:
        globals()[what]()
    except Exception:
        pass  # of the other rank's end

core = dist.group.WORLD.transport.core
before = len(core.records(rank))
if rank == 0 or what.endswith("s"):
    threading.Thread(target=quiet, daemon=True).start()
    while len(core.records(rank)) == before:
        pass
if rank == 1 and not what.endswith("s"):
    while core.state(0)[0] != 2:  # until rank 0 has left
        pass
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise LookupError("on purpose")
"""


@pytest.mark.slow
def test_a_process_ends_at_once_and_as_it_wants_while_a_daemon_thread_is_inside(tmp_path):
    """It died of SIGSEGV, or waited for the group's timeout, here an hour, because the exit hook wanted the lock."""
    cases = [
        ("all_reduce", "end"),
        ("recv", "exit"),
        ("backward", "raise"),
        ("collectives", "exit"),
        ("messages", "end"),
    ]
    command = [sys.executable, "-c", ENDING, str(tmp_path), json.dumps(cases)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    told = json.loads(run.stdout)
    for what, how in cases:
        for status, text in told[f"{what}-{how}"]:
            # A daemon thread that torch's own C++ has let go of the interpreter in aborts any process, with us or not.
            torchs = what.endswith("s") and "terminate called without an active exception" in text
            assert status == ({"end": 0, "exit": 3, "raise": 1}[how] if not torchs else -signal.SIGABRT), (what, text)
            assert ("LookupError: on purpose" in text) == (how == "raise"), (what, text)
            assert "Fatal" not in text, (what, text)


def _interrupt_each_other(rank, handler):
    """Run `handler` for SIGUSR1 on rank 1, once rank 0 sees it waiting in its next operation."""
    if rank == 1:
        signal.signal(signal.SIGUSR1, lambda signum, frame: handler())
        pid = torch.tensor([os.getpid()])
    else:
        pid = torch.empty(1, dtype=torch.int64)
    dist.broadcast(pid, 1)
    return int(pid)


def _await_begun(kind):
    """Until rank 1 is inside an operation of that kind; it will not come out before rank 0 joins."""
    core = dist.group.WORLD.transport.core
    while not ((records := read(core, 1)) and records[-1].name == kind and records[-1].leave_ns == 0):
        pass


@pytest.mark.parametrize("interrupted", ["all_reduce", "gradients"])
def test_a_collective_in_a_signal_handler_is_refused_at_once(interrupted):
    """It hung until killed, as it wanted the lock that the interrupted one held.

    At the end of a round of gradients, which takes no lock, it began, and the others raised a mismatch.
    """

    def check(rank, world_size):
        def handler():
            for call in (
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.all_reduce(torch.ones(1), async_op=True),
                dist.barrier,
                lambda: phalanx.shared_empty(10),
                reducer.begin,
                work.wait,
            ):
                try:
                    call()
                except PhalanxError as error:
                    refused.append(str(error))
            dist.send(torch.ones(1), 0, tag=9)

        refused, beside = [], torch.ones(1)
        tensor = phalanx.shared_empty(10).fill_(float(rank + 1))
        reducer = SharedReducer(dist.group.WORLD, [tensor], dist.ReduceOp.SUM)
        pid = _interrupt_each_other(rank, handler)
        reducer.begin()
        if rank == 0:
            while not any(r.name == interrupted and not r.leave_ns for r in read(dist.group.WORLD.transport.core, 1)):
                pass
            os.kill(pid, signal.SIGUSR1)
            dist.recv(torch.ones(1), 1, tag=9)  # the handler is over
        work = dist.all_reduce(beside, async_op=True)
        if interrupted == "all_reduce":
            work.wait()
        reducer.ready(0)
        reducer.finish()
        work.wait()
        assert (beside.item(), tensor.tolist()) == (2, [3.0] * 10)
        return refused

    nothing, refused = run_ranks(check, 2)
    assert nothing == []
    assert len(refused) == 6, refused
    assert all("called in a signal handler" in text and "set a flag" in text for text in refused), refused


def test_messages_in_a_signal_handler_run_while_one_waits():
    """A receive in a handler, during a receive, looked at no deadline: the wheel lay with the thread below it."""

    def check(rank, world_size):
        def handler():
            dist.recv(second, 0, tag=2)
            dist.send(second + 1, 0, tag=3)

        first, second, third = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        pid = _interrupt_each_other(rank, handler)
        if rank == 0:
            _await_begun("recv")
            os.kill(pid, signal.SIGUSR1)
            dist.send(torch.tensor([2.0]), 1, tag=2)
            dist.recv(third, 1, tag=3)
            dist.send(torch.tensor([1.0]), 1, tag=1)
            return third.item()
        dist.recv(first, 0, tag=1)
        return first.item(), second.item()

    assert run_ranks(check, 2) == [3.0, (1.0, 2.0)]


def test_a_receive_in_a_signal_handler_has_a_deadline():
    def check(rank, world_size):
        if rank == 1:
            # the message that ends the interrupted receive is asked for by the handler, when its own was over
            def handler():
                try:
                    dist.recv(torch.zeros(1), group_src=0, group=group, tag=2)
                except PhalanxError as error:
                    told.append(type(error).__name__)
                dist.send(torch.zeros(1), 0)

            told = []
        else:
            told, handler = [], None
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=1))  # for what is to fail, not for what leads to it
        pid = _interrupt_each_other(rank, handler)
        if rank == 0:
            _await_begun("recv")
            os.kill(pid, signal.SIGUSR1)
            dist.recv(torch.zeros(1), 1)
            dist.send(torch.zeros(1), 1, tag=1)
        else:
            dist.recv(torch.zeros(1), 0, tag=1)
        return told

    assert run_ranks(check, 2) == [[], ["DeadlineError"]]


@on_ranks(2)
def test_work_that_a_fork_inherits_cannot_be_waited_for_there(rank):
    """The wait never ended: the parent's thread carries the operation out, and nobody tells the child."""
    if rank == 0:
        dist.recv(torch.ones(1), 1)
        dist.send(torch.ones(1), 1, tag=5)
        dist.all_reduce(torch.ones(1))
        return
    works = [dist.irecv(torch.ones(1), 0, tag=5), dist.all_reduce(torch.ones(1), async_op=True)]
    child = os.fork()
    if child == 0:
        answers = []
        for work in works:
            try:
                work.wait()
            except ClosedError as error:
                answers.append("fork" in str(error))
        os._exit(0 if answers == [True, True] else 1)
    assert os.waitpid(child, 0)[1] == 0
    dist.send(torch.ones(1), 0)
    for work in works:
        work.wait()


def test_a_tensor_that_was_received_is_let_go_by_the_group():
    """The group kept its last 4096 receives that had to wait, with their tensors: gigabytes, in a loop of dist.recv."""

    def exchange(rank, world_size):
        kept = []
        for _ in range(20):
            if rank:
                dist.recv(torch.empty(1), 0)
                dist.send(torch.ones(5000), 0)
            else:
                tensor = torch.empty(5000)
                work = dist.irecv(tensor, 1)  # before the message is sent: it has to wait
                dist.send(torch.ones(1), 1)
                work.wait()
                assert tensor.sum() == 5000
                kept.append(weakref.ref(tensor.untyped_storage()))
                del tensor, work
        return sum(storage() is not None for storage in kept)

    assert run_ranks(exchange, 2)[0] <= 1


class SignalledLock:
    """A lock that runs a signal handler at each acquisition in the main thread, once it is acquired."""

    def __init__(self, lock, handler):
        self._lock, self._handler = lock, handler

    def __enter__(self):
        self._lock.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._handler()

    def __exit__(self, *exc_info):
        self._lock.__exit__(*exc_info)

    def __getattr__(self, name):
        return getattr(self._lock, name)


def test_a_signal_handler_that_interrupts_the_queue_itself_is_refused_too():
    """A handler came as the main thread held the queue's lock: its call waited for the queue's thread,
    which waited for the lock, until the group's timeout.
    """

    def check(rank, world_size):
        refused = []

        def handler():
            try:
                dist.all_reduce(torch.ones(1))
            except PhalanxError as error:
                refused.append(str(error))

        executor = dist.group.WORLD.executor
        executor._changed = SignalledLock(executor._changed, handler)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor.item(), len(refused) > 0, all("called in a signal handler" in text for text in refused)

    assert run_ranks(check, 2) == [(2.0, True, True)] * 2


@on_ranks(2)
def test_the_results_of_completed_calls_live_as_long_as_their_works(rank):
    """The value of a future that was requested late was [None]; the group must not keep the tensors itself."""
    works = [dist.all_reduce(torch.full((100,), float(i)), async_op=True) for i in range(6)]
    for work in works:
        work.wait(60.0)
    assert [work.get_future().value()[0][0].item() for work in works] == [2.0 * i for i in range(6)]
    kept = [weakref.ref(work.result()[0]) for work in works]
    assert all(ref() is not None for ref in kept)
    del works, work
    dist.all_reduce(torch.zeros(100), async_op=True).wait()
    dist.all_reduce(torch.zeros(100), async_op=True).wait()
    assert all(ref() is None for ref in kept)
