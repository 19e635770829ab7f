"""The examples of map_reduce give what a few lines of Python give."""

import json
import re
import sysconfig
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.examples.commands import ALONE, PHALANX_RUN, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_words_of_the_standard_library_are_counted_as_a_counter_does(tmp_path):
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(library.glob("json/*.py")), *sorted(library.glob("asyncio/*.py")), *library.glob("LICENSE.txt")]
    output = run(ROOT, PHALANX_RUN, "word_count.py", "--output", tmp_path, "--files", *files)
    want = Counter(" ".join(path.read_text(encoding="utf-8") for path in files).split())
    parts = sorted(tmp_path.glob("part-*"))
    assert len(parts) == 32
    assert dict(json.loads(line) for path in parts for line in path.read_text(encoding="utf-8").splitlines()) == want
    assert f"{want.total():,} words, {len(want):,} different" in output


@pytest.mark.slow
def test_an_index_of_our_documentation_names_the_files_that_have_a_word():
    files = sorted(ROOT.glob("docs/*/*.md"))
    output = run(ROOT, PHALANX_RUN, "inverted_index.py", *files, "--words", "gradient")
    index = defaultdict(list)
    for path in files:
        for word, times in Counter(re.findall(r"[a-z]{3,}", path.read_text().lower())).items():
            index[word].append((-times, path.name))
    best = ", ".join(f"{name} ({-times})" for times, name in sorted(index["gradient"])[:5])
    assert f"{len(index):,} words in {len(files)} files" in output
    assert f"gradient: {best}\n" in output


@pytest.mark.slow
def test_the_sampler_draws_by_what_was_counted_and_two_ranks_count_as_one():
    alone, two = (run(ROOT, launcher, "class_balance.py") for launcher in (ALONE, PHALANX_RUN))
    pattern = r"pixels: .*|samples of each digit: .*"
    assert re.findall(pattern, alone) == re.findall(pattern, two)
    (sizes,) = re.findall(r"samples of each digit: (.*)", alone)
    (drawn,) = re.findall(r"drawn in one epoch: +(.*)", alone)
    assert max(map(int, sizes.split())) > 10 * min(map(int, sizes.split()))
    assert max(map(int, drawn.split())) < 2 * min(map(int, drawn.split()))
