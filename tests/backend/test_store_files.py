"""A store in a file beside torch's others. Under `phalanx run` it is the default store of scripts that know TCPStore.

`append("log", "x")` of four ranks left "x", a key that did not come was a RuntimeError that nobody caught, and
`delete_key` of a key that was not there said True.
"""

import subprocess
import sys

import pytest
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx._comm.backend import store_appends

# The patch is for a whole process, so it is tried in one of its own.
PROGRAM = """
import random, sys
from collections import Counter
from datetime import timedelta
import torch.distributed as dist
from phalanx._comm.backend.torch_integration.stores import patch_file_store

def said(store, seed, waited):
    choose = random.Random(seed)
    store.set_timeout(timedelta(milliseconds=20))
    answers = []
    for _ in range(60):
        key, value = choose.choice("abc"), choose.choice(["", "x", "x", "y", "x y"])
        name, call = choose.choice([
            ("append", lambda: store.append(key, value)), ("append", lambda: store.append(key, value)),
            ("set", lambda: store.set(key, value)), ("get", lambda: store.get(key)),
            ("compare_set", lambda: store.compare_set(key, choose.choice(["", "x"]), value)),
            ("check", lambda: store.check([key])), ("delete_key", lambda: store.delete_key(key)),
            ("wait for", lambda: store.wait([key, "a"], timedelta(milliseconds=20))),
            ("wait", lambda: store.wait([key])), ("multi_get", lambda: store.multi_get([key, "a"])),
        ])
        if name in ("get", "wait", "wait for", "multi_get") and not store.check([key, "a"]):
            waited[name] += 1
            if waited[name] > 1:
                continue  # torch's FileStore waits for a second at least
        try:
            answers.append((name, key, value, call()))
        except RuntimeError as error:
            answers.append((name, key, value, type(error).__name__))
    return answers

patch_file_store()
for wrap in (lambda file: file, lambda file: dist.PrefixStore("p", dist.PrefixStore("q", file))):
    our_waits, their_waits = Counter(), Counter()
    for seed in range(20):
        store = wrap(dist.FileStore(f"{sys.argv[1]}/{id(our_waits)}.{seed}", 1))
        ours, theirs = said(store, seed, our_waits), said(dist.HashStore(), seed, their_waits)
        assert ours == theirs, [pair for pair in zip(ours, theirs) if pair[0] != pair[1]][0]
        assert {"DistStoreError"} >= {answer[3] for answer in ours if "Error" in str(answer[3])}
    assert min(our_waits[name] for name in ("get", "wait", "wait for", "multi_get")) >= 1
    memory = dist.PrefixStore("h", dist.HashStore())  # others' methods stay
    assert said(memory, 1, Counter()) == said(dist.HashStore(), 1, Counter())
"""


@pytest.mark.slow
def test_programs_of_any_calls_get_the_answers_of_torchs_store_in_memory(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr


@on_ranks(4, init=False)
def test_equal_values_of_many_ranks_are_all_appended(rank, world_size, tmp_path):
    store = dist.PrefixStore("in", dist.FileStore(str(tmp_path / "store"), world_size))
    for i in range(15):
        store_appends.append(store, "equal", "x")
        store_appends.append(store, "named", f"{rank}.{i} ".encode())
    store.add("over", 1)
    while store.add("over", 0) < world_size:
        pass
    equal, named = store.get("equal"), store.get("named").decode().split()
    assert equal == b"x" * 60
    assert sorted(named) == sorted(f"{r}.{i}" for r in range(4) for i in range(15))
    for r in range(4):
        assert [name for name in named if name.startswith(f"{r}.")] == [f"{r}.{i}" for i in range(15)]


class _Died(Exception):
    pass


class _Steps:
    """This is a store in which a rank dies after `steps` calls, and another appends before one of them."""

    def __init__(self, steps, other_at):
        self.values = {}
        self.left = steps
        self.other_at = other_at
        self.others = 0

    def _step(self):
        if self.left == self.other_at:
            self.other_at, left, self.left = -1, self.left, 1000
            store_appends.append(self, "log", "x")
            self.others, self.left = 1, left
        self.left -= 1
        if self.left < 0:
            raise _Died

    def check(self, keys):
        self._step()
        return keys[0] in self.values

    def get(self, key):
        self._step()
        return self.values[key]

    def compare_set(self, key, old, new):
        self._step()
        if self.values.get(key, b"") == old:
            self.values[key] = new
        return self.values.get(key, old)


@pytest.mark.parametrize("steps", range(14))
def test_an_append_whose_rank_dies_at_any_step_is_carried_out_once_or_not_at_all(steps):
    """And another rank's append before any step of it finds its place."""
    for other_at in range(steps + 1):
        store = _Steps(steps, other_at)
        counts = {1}
        try:
            store_appends.append(store, "log", "x")
        except _Died:
            counts = {0, 1}
        store.left = 1000
        store_appends.append(store, "log", "x")
        assert store.values["log"] in {b"x" * (store.others + 1 + n) for n in counts}
        store.values["log"] = b""  # a claim that is over is not carried out again
        store_appends.append(store, "log", "y")
        assert store.values["log"] == b"y"
