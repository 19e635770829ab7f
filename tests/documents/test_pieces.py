"""Every block that a reader could type is run: by this test, by another one, or its comment says why not.

The pieces of Python of a page run in their order, in a job of one rank, with the names that a reader has anyway: a
model, a dataset, a loss. That is no test of what they compute; it shows that they are complete and that
the names are right.
"""

from __future__ import annotations

import sys

import pytest
from tests.documents.blocks import ROOT, RUN_IN, blocks, documents
from tests.documents.followed import PAGES as FOLLOWED
from tests.documents.typed import run

# Pages all of whose blocks a test of their own runs.
ELSEWHERE = {
    "README": "tests/examples/test_readme.py",
    "articles": "tests/articles/test_articles.py",
    "from-python": "tests/launch/test_calls.py",
    "libraries": "tests/libraries/test_libraries.py",
    "trainer": "tests/trainer/test_moving.py",
}
PRELUDE = """
import functools, itertools, operator
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import init_process_group
from torch.utils.data import DataLoader, TensorDataset
import phalanx
from phalanx.checkpoint import RandomState
from phalanx.mapreduce import map_reduce

torch.manual_seed(0)
dataset = data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loss_fn = loss_of = loss = F.cross_entropy

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

Model, example, m = build_model, torch.randn(8, 8), 4
phalanx.init()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
sampler = phalanx.DistributedSampler(dataset)
loader = batches = DataLoader(dataset, batch_size=8, sampler=sampler)
inputs, targets = dataset.tensors
x, y = dataset[:8]

def train(batch):
    pass
"""
# What the pieces of a page need besides.
LAUNCHED = """
import tempfile
torch.distributed.destroy_process_group()
address = f"file://{tempfile.mkdtemp()}/meet"
init_process_group = functools.partial(init_process_group, init_method=address, rank=0, world_size=1)
"""
BESIDES = {
    "algorithms": LAUNCHED,
    "groups-across-hosts": LAUNCHED,
    "launching": "def begin(): pass",
    "mapreduce": """
import pathlib
pathlib.Path("texts").mkdir()
pathlib.Path("texts/a.txt").write_text("a word and a word")
""",
    "checkpoints": "batches = [(x, y) for _ in range(13) for x, y in loader]",
    "data": "phalanx.save_checkpoint('run.pt', {'sampler': sampler.state_dict(consumed=0)})",
    "streams": """
import json, pathlib
import pyarrow, pyarrow.parquet
paths = []
for number in range(3):
    paths.append(f"{number}.jsonl")
    pathlib.Path(paths[-1]).write_text("".join(json.dumps({"text": f"{number} {n}"}) + "\\n" for n in range(50)))
pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "other": [1, 2]}), "a.parquet")
tables, tokenize = ["a.parquet"], len
""",
    "report": """
import collections
queue = collections.namedtuple("Queue", "get")(lambda: [1.0, 2.0])
simulate = sum
""",
    "elastic": """
model = phalanx.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
later = phalanx.elastic.State(head=nn.Linear(4, 2))
@phalanx.elastic.run(later)
def tune(state):
    return state
""",
    "pipeline": """
job = phalanx._comm.backend.Job(0, 1, 0, torch.device("cpu"))
def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

Model, model = build_model, build_model()
phalanx.save_checkpoint("model.pt", {"model": model.state_dict()})
loader = [(x, y)] * 3
step = 3
""",
}
RUN = """
import sys
pieces = {pieces!r}
names = {{"__name__": "__main__"}}
for prelude in {preludes!r}:
    exec(compile(prelude, "prelude", "exec"), names)
for where, code in pieces:
    exec(compile(code, where, "exec"), names)
    print("ran", where)
if names["torch"].distributed.is_initialized():
    names["torch"].distributed.destroy_process_group()
"""


def pieces(document):
    """The blocks that this test runs, in their order."""
    for block in blocks(document):
        if block.language == "python" and not block.title and not block.why_not:
            yield block


PAGES = [
    page
    for page in documents()
    if page.stem not in ELSEWHERE and page.parent.name != "tutorials" and list(pieces(page))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow(but=("data-parallel",))
def test_the_pieces_of_a_page_run(page, tmp_path):
    shown = [(str(block), block.code) for block in pieces(page)]
    script = tmp_path / "pieces.py"
    script.write_text(RUN.format(pieces=shown, preludes=[PRELUDE, BESIDES.get(page.stem, "")]), encoding="utf-8")
    done = run([sys.executable, str(script)], tmp_path)
    assert done.code == 0, done.output
    assert done.output.count("ran ") >= len(shown)
    assert done.warnings == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_that_can_be_typed_is_run_or_says_why_not(document):
    if document.stem in ELSEWHERE:
        assert (ROOT / ELSEWHERE[document.stem]).exists()
        return
    left = []
    for block in blocks(document):
        if block.language not in RUN_IN or block.why_not:
            continue
        if block.language == "python" and not block.title:
            continue  # a piece, which the test above runs
        if document in FOLLOWED and (block.title or block.language == "console"):
            continue
        left.append(str(block))
    assert left == [], "blocks that nobody runs: say why in a comment, <!-- not run: why -->"
