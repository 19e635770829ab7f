"""Groups across real hosts: network namespaces joined by a switch, with the ranks as processes inside them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from tests.system.collective_checks import messages, moves, reductions, tensor_of
from tests.system.hosts_jobs import on_hosts
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import phalanx
from phalanx._comm.backend.process_group import PhalanxProcessGroup
from phalanx._comm.diagnostics.flight_recorder import read
from phalanx._comm.transport.hierarchical.transport import HierarchicalTransport
from phalanx._comm.transport.shared_memory import SharedMemoryTransport
from phalanx.testing import RankFailed, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

LAYOUTS = [(2, 2), (1, 1, 1), (2, 1), (1, 3)]


def recorded(rank, world_size, machines):
    """The flight recorder has a line for each operation of the user, not for what it is made of."""
    dist.barrier()
    dist.all_reduce(torch.ones(3, 4), op=dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(600_000), src=world_size - 1)
    dist.reduce(torch.ones(5), dst=1)
    if rank == 0:
        dist.send(torch.ones(7), world_size - 1)
    elif rank == world_size - 1:
        dist.recv(torch.ones(7), 0)
    group = dist.group.WORLD
    core, me = group.transport.session.core, group.transport.layout.local_rank
    lines = read(core, me)[-5 if rank in (0, world_size - 1) else -4 :]
    assert [(r.call().partition(" at ")[0], r.status_name) for r in lines[:4]] == [
        ("barrier", "ok"),
        ("all_reduce(MAX) of float32 (3, 4)", "ok"),
        (f"broadcast(src={world_size - 1}) of float32 (600000,)", "ok"),
        ("reduce(SUM, dst=1) of float32 (5,)", "ok"),
    ]
    assert all("test_hosts.py:" in r.call_site for r in lines)
    assert [r.seq for r in lines[:4]] == list(range(lines[0].seq, lines[0].seq + 4))
    if rank == 0:
        assert (lines[4].label, lines[4].shape) == (f"send to rank {world_size - 1}", (7,))
    elif rank == world_size - 1:
        assert (lines[4].label, lines[4].shape) == ("recv from rank 0", (7,))


@pytest.mark.slow(but=("(2, 1)",))
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_collective_gives_the_values_of_one_host(sizes):
    def check(rank, world_size, machines):
        assert isinstance(dist.group.WORLD, PhalanxProcessGroup)
        assert isinstance(dist.group.WORLD.transport, HierarchicalTransport)
        reductions(rank, world_size)
        moves(rank, world_size)
        messages(rank, world_size)
        recorded(rank, world_size, machines)
        works = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(5)]
        for i, work in enumerate(works):
            work.wait()
            assert work.result()[0].tolist() == [float(i * world_size)] * 3
        return True

    assert all(on_hosts(sizes, check))


def test_a_subgroup_uses_memory_alone_where_its_ranks_share_a_host():
    def check(rank, world_size, machines):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = dist.new_group([1, 2])
        mine = pairs[rank // 2]
        assert isinstance(mine.transport, SharedMemoryTransport)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mine)
        if rank in (1, 2):
            assert isinstance(across.transport, HierarchicalTransport)
            dist.all_reduce(tensor, group=across)
        return tensor.item()

    assert on_hosts((2, 2), check) == [1.0, 6.0, 6.0, 5.0]


@pytest.mark.slow
def test_an_all_reduce_sends_what_the_hierarchy_promises_and_half_of_it_in_bfloat16():
    nbytes = 4 * 2**20

    def check(rank, world_size, machines):
        sent = []
        for options in (phalanx.Options(), phalanx.Options(wire_dtype=torch.bfloat16)):
            group = dist.new_group(backend="phalanx", pg_options=options)
            tensor = torch.ones(nbytes // 4)
            dist.barrier()
            before = machines[0].bytes_sent() if rank == 0 else 0
            dist.barrier()
            dist.all_reduce(tensor, group=group)
            dist.barrier()
            sent.append((machines[0].bytes_sent() - before) / nbytes if rank == 0 else 0)
        return sent

    # 2(H-1)/H of the tensor for H = 2 hosts, of which each host sends its half; and headers.
    whole, half = on_hosts((2, 2), check)[0]
    assert 1.0 <= whole <= 1.05
    assert 0.5 <= half <= 0.55


@pytest.mark.slow
def test_every_byte_crosses_a_hosts_edge_once():
    part = 2**18  # elements of a rank's part; bytes are told in such parts

    def check(rank, world_size, machines):
        parts = [torch.full((part,), float(rank)) for _ in range(world_size)]
        whole, got = torch.cat(parts), [torch.empty(part) for _ in range(world_size)]
        calls = {
            "barrier": dist.barrier,
            "all_reduce": lambda: dist.all_reduce(whole.clone()),
            "reduce here": lambda: dist.reduce(whole.clone(), 1),
            "reduce there": lambda: dist.reduce(whole.clone(), 2),
            "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(part), parts),
            "all_gather": lambda: dist.all_gather(got, parts[0]),
            "all_to_all": lambda: dist.all_to_all(got, parts),
            "broadcast from here": lambda: dist.broadcast(whole.clone(), 1),
            "broadcast from there": lambda: dist.broadcast(whole.clone(), 2),
            "gather here": lambda: dist.gather(parts[0], got if rank == 1 else None, 1),
            "gather there": lambda: dist.gather(parts[0], got if rank == 2 else None, 2),
            "scatter from here": lambda: dist.scatter(got[0], parts if rank == 1 else None, 1),
            "scatter from there": lambda: dist.scatter(got[0], parts if rank == 2 else None, 2),
        }
        sent = {}
        for name, call in calls.items():
            dist.barrier()
            before = machines[0].bytes_sent() if rank == 0 else 0
            dist.barrier()
            call()
            dist.barrier()
            sent[name] = (machines[0].bytes_sent() - before) / (4 * part) if rank == 0 else 0.0
        return sent

    # Four parts, two hosts of two ranks; what the first host sends, in parts, headers and fingerprints aside.
    expected = {
        "barrier": 0,
        "all_reduce": 4,  # 2(H-1)/H of the tensor
        "reduce here": 0,
        "reduce there": 4,
        "reduce_scatter": 2,  # the other host's parts, added up
        "all_gather": 2,
        "all_to_all": 4,  # two ranks, two parts for the other host each
        "broadcast from here": 4,
        "broadcast from there": 0,
        "gather here": 0,
        "gather there": 2,
        "scatter from here": 2,
        "scatter from there": 0,
    }
    sent = on_hosts((2, 2), check)[0]
    assert sent == {name: pytest.approx(parts, rel=0.05, abs=0.1) for name, parts in expected.items()}


def test_a_small_all_reduce_is_one_message_each_way_and_a_larger_one_gloos_own_once_all_agree():
    def check(rank, world_size, machines):
        session, agreement = dist.group.WORLD.transport.session, dist.group.WORLD.transport.agreement
        log = []
        send, begin, receive = session.leaders.send, session.engine.begin, agreement.receive_heads

        def logged(name, call):
            def wrapped(*args, **kwargs):
                log.append(name)
                return call(*args, **kwargs)

            return wrapped

        session.leaders.send = logged("heads go", send)
        session.engine.begin = logged("data goes", begin)
        agreement.receive_heads = logged("wait for heads", receive)
        small, larger = torch.ones(65_536), torch.ones(65_537)
        dist.all_reduce(small)
        dist.all_reduce(larger)
        return log, small[0].item(), larger[0].item()

    expected = ["heads go", "wait for heads", "heads go", "wait for heads", "data goes"]
    assert on_hosts((1, 1), check) == [(expected, 2.0, 2.0)] * 2


@pytest.mark.slow
def test_a_large_tensor_arrives_whole_although_it_travels_in_segments():
    def check(rank, world_size, machines):
        shape = (1_500_001,)
        brought = [tensor_of(r, shape, torch.float32) for r in range(world_size)]
        mine = brought[rank].clone()
        dist.all_reduce(mine)
        halves = brought[rank].to(torch.bfloat16)
        dist.all_reduce(halves, op=dist.ReduceOp.AVG)
        mean = torch.stack(brought).mean(0).to(torch.bfloat16)
        return torch.equal(mine, torch.stack(brought).sum(0)), torch.equal(halves, mean)

    assert on_hosts((2, 1), check) == [(True, True)] * 3


def test_every_algorithm_gives_every_rank_the_same_bits():
    def check(rank, world_size, machines):
        for algorithm in ("ring", "tree", "halving_doubling", "single", "hierarchical"):
            options = phalanx.Options(algorithm=algorithm, wire_dtype=torch.bfloat16)
            group = dist.new_group(backend="phalanx", pg_options=options)
            torch.manual_seed(rank)
            tensor = torch.randn(1001)
            brought = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(brought, tensor, group=group)
            dist.all_reduce(tensor, group=group)
            torch.testing.assert_close(tensor, torch.stack(brought).sum(0), rtol=2e-2, atol=5e-2)
            everybody = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(everybody, tensor, group=group)
            assert all(torch.equal(tensor, other) for other in everybody), algorithm
        return True

    assert all(on_hosts((1, 1, 1), check))


@pytest.mark.slow
def test_error_feedback_keeps_a_running_sum_true_where_plain_rounding_drifts():
    def drift(rank, world_size, machines):
        gradient = torch.full((256,), 1.0 + 2.0**-9)  # bfloat16 keeps 8 bits: rounded down, always
        ends = []
        for feedback in (False, True):
            options = phalanx.Options(wire_dtype=torch.bfloat16, error_feedback=feedback)
            group = dist.new_group(backend="phalanx", pg_options=options)
            total, buffer = torch.zeros(256), torch.empty(256)
            for _ in range(64):
                buffer.copy_(gradient)
                dist.all_reduce(buffer, group=group)
                total += buffer
            ends.append((total - 64 * world_size * gradient).abs().max().item())
        return ends

    (plain, kept), other = on_hosts((1, 1), drift)
    assert [plain, kept] == other
    assert plain > 0.1
    assert kept < 0.05


def test_ddp_trains_the_same_model_on_every_host():
    def check(rank, world_size, machines):
        torch.manual_seed(0)
        model = phalanx.DistributedDataParallel(torch.nn.Linear(5, 3))
        reference = torch.nn.Linear(5, 3)
        reference.load_state_dict(model.module.state_dict())
        batches = [tensor_of(r, (4, 5), torch.float32) for r in range(world_size)]
        model(batches[rank]).square().mean().backward()
        torch.stack([reference(batch).square().mean() for batch in batches]).mean().backward()
        torch.testing.assert_close(model.module.weight.grad, reference.weight.grad)
        return True

    assert all(on_hosts((2, 1), check))


HOOKS = {
    "none": lambda: None,
    "power": lambda: (PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook),
}
STEPS = 3


def compressed_steps(rank, world_size, machines):
    """Return the bytes that leave all hosts in the third step with each hook; ranks then hold equal gradients."""
    bytes_sent = {}
    for name, make in HOOKS.items():
        torch.manual_seed(0)
        ddp = phalanx.DistributedDataParallel(torch.nn.Linear(400, 500), check=False)
        made = make()
        if made:
            ddp.register_comm_hook(*made)
        for step in range(STEPS):
            if step == STEPS - 1:
                dist.barrier()
                before = sum(machine.bytes_sent() for machine in machines)
                dist.barrier()
            ddp.zero_grad()
            ddp(
                torch.randn(8, 400, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
        dist.barrier()
        bytes_sent[name] = sum(machine.bytes_sent() for machine in machines) - before
        gradients = [torch.empty_like(ddp.module.weight) for _ in range(world_size)]
        dist.all_gather(gradients, ddp.module.weight.grad)
        assert all(torch.equal(one, gradients[0]) for one in gradients), name
    return bytes_sent


def test_power_sgd_sends_fewer_bytes_between_hosts_and_leaves_the_same_bits():
    sent = on_hosts((1, 1), compressed_steps)[0]
    assert sent["power"] < 0.1 * sent["none"]


PUBLIC = "8.77.0"


def _sum(rank, world_size, machines):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_a_public_address_is_refused_on_all_ranks_before_anything_listens():
    with pytest.raises(RankFailed) as caught:
        on_hosts((1, 2), _sum, network=PUBLIC)
    assert sorted(caught.value.errors) == [0, 1, 2]
    for rank, error in caught.value.errors.items():
        assert f"init_process_group of group '0' on rank {rank}: tensors would be sent to and from" in str(error)
        assert f"{PUBLIC}.1 on " in str(error)
        assert f"{PUBLIC}.2 on " in str(error)
        assert "Options(allow_public_address=True), or set PHALANX_ALLOW_PUBLIC_ADDRESS=1" in str(error)


def test_whoever_asks_for_a_public_address_by_option_or_variable_gets_it():
    def check(rank, world_size, machines):
        os.environ["PHALANX_ALLOW_PUBLIC_ADDRESS"] = "1"
        dist.new_group([0, 1], backend="phalanx")
        return _sum(rank, world_size, machines)

    assert on_hosts((1, 1), check, network=PUBLIC, options=phalanx.Options(allow_public_address=True)) == [2.0, 2.0]


def test_ranks_listen_at_the_interface_that_is_asked_for_and_at_no_other():
    """They meet at a public address, and send tensors through a private network between the same hosts."""

    def check(rank, world_size, machines):
        totals = []
        for options in (phalanx.Options(interface="eth0"), None):  # then by the variable
            if options is None:
                os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            group = dist.new_group([0, 1], backend="phalanx", pg_options=options)
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            totals.append(tensor[0].item())
        inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_there(fd)}
        return totals, [at for at, inode in _listeners() if f"socket:[{inode}]" in inodes]

    for rank, (totals, listens) in enumerate(on_hosts((1, 1), check)):
        assert totals == [2.0, 2.0]
        assert f"10.77.0.{rank + 1}" in listens
        assert set(listens) <= {f"10.77.0.{rank + 1}", "::"}  # the latter is PyTorch's store, on rank 0
        assert rank == 0 or "::" not in listens


def _is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _listeners():
    """Address and inode of each TCP socket of this network that listens."""
    for name, words in (("tcp", 4), ("tcp6", 16)):
        with open(f"/proc/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] != "0A":
                    continue
                digits = fields[1].partition(":")[0]
                if words == 4:
                    yield ".".join(str(int(digits[i : i + 2], 16)) for i in (6, 4, 2, 0)), fields[9]
                elif set(digits) == {"0"}:
                    yield "::", fields[9]
                else:  # an IPv4 address in IPv6's clothes
                    yield ".".join(str(int(digits[i : i + 2], 16)) for i in (30, 28, 26, 24)), fields[9]
