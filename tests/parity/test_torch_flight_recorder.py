"""PyTorch's flight recorder shows our groups: its dumps hold our collectives, and its analyser reads them.

From 2.15 on torch hangs a recorder on each group. Ours never showed in its dumps: their calls pass the dispatcher by.
"""

import json
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.errors import PhalanxError
from phalanx.testing import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:Failing to pass a value to the 'type_params':DeprecationWarning", "ignore:.*is deprecated:FutureWarning"
)
NAMES_BACKENDS = "backend" in (c10d._dump_fr_trace.__doc__ or "")
US = (
    "phalanx" if NAMES_BACKENDS else "gloo"
)  # as whose our entries go; an older analyser refuses names it has not heard of
names_backends = pytest.mark.skipif(not NAMES_BACKENDS, reason="before torch 2.15 a dump has no backend's name")


def _call_everything(rank, world_size):
    """Each kind of collective once, in two groups; then a message from each rank to the next."""
    pair = dist.new_group([0, 1], group_desc="the pair")
    x, whole, part = torch.ones(3, 2), torch.empty(3 * world_size, 2), torch.empty(1, 2)
    pieces = [torch.empty(3, 2) for _ in range(world_size)]
    dist.all_reduce(x)
    dist.broadcast(x.double(), 1)
    dist.reduce(x, 0)
    dist.all_gather(pieces, x)
    dist.all_gather_into_tensor(whole, x)
    dist.gather(x, pieces if rank == 1 else None, 1)
    dist.scatter(x, pieces if rank == 0 else None, 0)
    dist.reduce_scatter(x, pieces)
    dist.reduce_scatter_tensor(part.expand(3, 2).contiguous(), whole)
    dist.all_to_all(pieces, [x] * world_size)
    dist.barrier()
    if rank < 2:
        dist.all_reduce(torch.ones(5, dtype=torch.bfloat16), group=pair, async_op=True).wait()
    return pair


EXPECTED = [
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather", "gather", "scatter", "reduce_scatter",
    "reduce_scatter", "all_to_all", "barrier",
]  # fmt: skip


def _analyse(dumps):
    """Return the collectives that torch's analyser finds in the dumps of all ranks."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    arguments = JobConfig().parse_args(args=[])
    arguments.allow_incomplete_ranks = True
    details = {f"trace{r}": {"rank": r, "host_name": f"host{r}", **dump} for r, dump in enumerate(dumps)}
    return build_db(details, arguments, dumps[0]["version"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_analyser_matches_every_collective_of_ours(world_size):
    def body(rank, world_size):
        _call_everything(rank, world_size)
        return c10d._dump_fr_trace()

    database = _analyse([pickle.loads(dump) for dump in run_ranks(body, world_size)])
    found = [c for c in database.collectives if c.pg_desc == "0:default_pg"]
    assert [c.collective_name for c in found] == [f"{US}:{name}" for name in EXPECTED]
    assert all(c.pass_check and c.collective_state == "completed" for c in database.collectives)
    assert [c.collective_name for c in database.collectives if c.pg_desc.endswith("the pair")] == [f"{US}:all_reduce"]
    assert {(group.desc, group.size) for group in database.groups} == {("default_pg", world_size), ("the pair", 2)}
    assert found[0].collective_frames[0]["filename"].endswith("test_torch_flight_recorder.py")


@names_backends
def test_an_entry_has_what_gloos_has():
    """All of Gloo's fields, and its values where they do not depend on time; ours knows more of the state."""

    def body(rank, world_size, backend):
        x = torch.ones(3, 2)
        dist.all_reduce(x)
        dist.broadcast(x.long(), 1)
        dist.barrier()
        return c10d._dump_fr_trace(backend=backend), c10d._dump_fr_trace_json(backend=backend)

    theirs, ours = (run_ranks(body, 2, name, backend=name)[0] for name in ("gloo", "phalanx"))
    mine, gloos = pickle.loads(ours[0]), pickle.loads(theirs[0])
    assert set(gloos) <= set(mine)
    assert mine["version"] == gloos["version"]
    for a, b in zip(mine["entries"][:2], gloos["entries"][:2], strict=True):
        assert set(b) - set(a) == set()
        same = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "process_group", "is_p2p", "timeout_ms")
        assert [a[key] for key in same] == [b[key] for key in same]
        assert a["profiling_name"].split(":")[1] == b["profiling_name"].split(":")[1]
        assert {type(a[key]) for key in ("time_created_ns", "collective_seq_id", "record_id")} == {int}
    assert set(json.loads(theirs[1])) - {"nccl_comm_state"} <= set(json.loads(ours[1]))


def test_the_analyser_names_the_rank_that_did_not_come():
    def body(rank, world_size):
        dist.all_reduce(torch.ones(2))
        if rank == 1:  # which goes
            return c10d._dump_fr_trace()
        with pytest.raises(PhalanxError):
            dist.broadcast(torch.ones(4), 0)
        return c10d._dump_fr_trace()

    dumps = [pickle.loads(dump) for dump in run_ranks(body, 3)]
    last = dumps[0]["entries"][-1]
    assert (last["profiling_name"], last["state"], last["retired"]) == (f"{US}:broadcast", "started", True)
    missing = [c.missing_ranks for c in _analyse(dumps).collectives if c.missing_ranks]
    assert missing == [{1}]


def test_messages_say_who_sends_to_whom_and_what_is_under_way_is_active():
    def body(rank, world_size):
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)
        else:
            dist.recv(torch.empty(3), 0, tag=5)
            work = dist.irecv(torch.empty(7), 0)
        active = pickle.loads(c10d._dump_fr_trace(True, False, True))["entries"]
        all_of_it = pickle.loads(c10d._dump_fr_trace(onlyActive=False))["entries"]
        if rank == 0:
            dist.recv(torch.empty(1), 1)
            dist.send(torch.ones(7), 1)
        else:
            dist.send(torch.ones(1), 0)
            work.wait()
        return [e["profiling_name"] for e in all_of_it], [(e["output_sizes"], e["state"]) for e in active]

    first, second = run_ranks(body, 2)
    assert first == ([f"{US}:send 0->1"], [])
    assert second == ([f"{US}:recv 1<-0"] * 2, [([[7]], "started")])


def test_records_outlive_their_group_and_are_counted_through():
    """A program dumps when it has failed, and may have left its groups by then; a ring begins in the middle."""

    def body(rank, world_size):
        for _ in range(200):
            dist.all_reduce(torch.ones(1))
        pair = dist.new_group([0, 1])
        dist.barrier(group=pair)
        dist.destroy_process_group(pair)
        dump = pickle.loads(c10d._dump_fr_trace())
        return [(e["record_id"], e["collective_seq_id"]) for e in dump["entries"]], dump["pg_status"]

    for entries, status in run_ranks(body, 2):
        numbers = [record for record, _ in entries]
        assert numbers == list(range(numbers[0], numbers[0] + len(entries)))
        assert numbers[0] > 0
        assert entries[-1][1] == 1  # the group that is left
        assert len(status) == 2


@names_backends
def test_files_and_resets_are_those_of_the_named_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))

    def body(rank, world_size):
        dist.all_reduce(torch.ones(2))
        c10d._reset_fr_trace(backend="phalanx")
        dist.all_reduce(torch.ones(3))
        c10d._dump_fr_trace_file(rank, backend="phalanx")
        of_gloo = json.loads(c10d._dump_fr_trace_json(backend="gloo"))
        return "entries" in of_gloo

    assert run_ranks(body, 2) == [False, False]
    made = tmp_path / "made"
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(tmp_path), "-p", "trace_", "-o", str(made)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    found = pickle.loads(made.read_bytes())[1].collectives
    assert [(c.collective_name, c.input_sizes, c.collective_state) for c in found] == [
        ("phalanx:all_reduce", [[3]], "completed")
    ]


def test_a_recorder_that_is_switched_off_shows_nothing(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")

    def body(rank, world_size):
        dist.all_reduce(torch.ones(2))
        return pickle.loads(c10d._dump_fr_trace())["entries"]

    assert run_ranks(body, 2) == [[], []]
