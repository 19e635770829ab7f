"""What is said of measurements: the sentences, the tables, the picture."""

import json
import os
import xml.etree.ElementTree as ET

import pytest

from phalanx.bench.comparison import Comparison, explain
from phalanx.bench.contestants import CONTESTANTS, DDP, DP, ONE, POOL
from phalanx.bench.load import Load
from phalanx.bench.picture import draw
from phalanx.bench.report import as_json, as_text
from phalanx.bench.sample import PARTS, Sample, median_of, slowest_of
from phalanx.bench.workloads import WORKLOADS

FORWARD = {"computing": 0.004, "waiting": 0.0, "backward": 0.006, "update": 0.001}


def _sample(step, stops=0, **parts):
    return Sample(step, {**FORWARD, **parts}, 100.0, stops)


def _comparison(dp, *, ddp=None, world_size=2):
    samples = {
        ONE: [_sample(0.016)],
        POOL: [_sample(0.014)],
        DP: [dp],
        DDP: [ddp or _sample(0.012)],
    }
    return Comparison(WORKLOADS["many-small"], world_size, samples)


def _contending():
    """Replicas that contend for the interpreter."""
    return _sample(0.040, stops=60, computing=0.008, waiting=0.002, replicate=0.012, scatter=0.001, threads=0.003)


def _apart():
    return _sample(0.013, stops=1, replicate=0.0005, scatter=0.0002, threads=0.0003)


def _text(comparison, cores=2):
    return " ".join(explain(comparison, cores))


def test_the_medians_are_of_each_figure_by_itself():
    samples = [_sample(step, stops=stops, waiting=wait) for step, stops, wait in ((1, 5, 3), (2, 6, 1), (9, 1, 2))]
    median = median_of(samples)
    assert (median.step, median.stops, median.parts["waiting"]) == (2, 5, 2)
    assert "replicate" not in median.parts
    assert median_of([Sample(1.0, {}, 1.0)]).stops is None


def test_the_slowest_rank_is_the_one_that_counts():
    assert slowest_of([_sample(1), _sample(3), _sample(2)]).step == 3


def test_threads_that_contend_for_the_interpreter_are_told_with_the_figures():
    text = _text(_comparison(_contending()))
    assert "A step of DataParallel takes 40 ms: 3.33 times that of DistributedDataParallel (12 ms), and 2.50" in text
    assert "makes 2 replicas of the model (12 ms), cuts and joins the batch (1 ms), and starts and ends" in text
    assert ": 40% of its time" in text
    assert "forward takes 10 ms (8 ms of a processor's time, stopping 60 times) in a thread, and 4 ms" in text
    assert "take turns at the interpreter (GIL): that makes their forward 2.5 times as long" in text
    assert "lies, the largest parts first: make replicas +12 ms, forward: computing +4 ms, start" in text
    assert "Fastest here: DistributedDataParallel, 2 processes, 12 ms. Threads inside each operation" in text


def test_threads_that_do_not_contend_are_told_so():
    text = _text(_comparison(_apart()))
    assert "hardly contend for the interpreter" in text
    assert "as long." not in text


def _rounds(*pairs, others=0.0):
    """A comparison whose rounds took these steps, of DataParallel and of DistributedDataParallel."""
    samples = {ONE: [_sample(0.016)], POOL: [_sample(0.014)]}
    samples[DP] = [_sample(step, stops=60, waiting=0.01, replicate=0.0, scatter=0.0, threads=0.0) for step, _ in pairs]
    samples[DDP] = [_sample(step) for _, step in pairs]
    return Comparison(WORKLOADS["many-small"], 2, samples, others)


def test_on_a_busy_machine_the_reader_is_told_and_nothing_is_blamed_on_the_interpreter():
    """It explained with the GIL what other programs on the same cores had done."""
    text = _text(_rounds((0.040, 0.012), (0.041, 0.013), others=1.3))
    assert text.startswith("This machine was busy: other programs took 1.3 of the 2 cores meanwhile, and every figure")
    assert "cannot be told from these rounds" in text
    assert "take turns at the interpreter" not in text
    assert "Which is faster" not in text


def test_rounds_that_scatter_more_than_the_contestants_differ_decide_nothing():
    text = _text(_rounds((0.040, 0.012), (0.012, 0.030)))
    assert "a step of DataParallel took 12 ms to 40 ms, one of DistributedDataParallel 12 ms to 30 ms. Which is" in text
    assert "This machine was busy" not in text
    assert "take turns at the interpreter" not in text
    # one round in five that went astray decides nothing either
    calm = _text(_rounds((0.040, 0.012), (0.041, 0.013), (0.040, 0.012), (0.042, 0.099), (0.011, 0.012)))
    assert "scatter" not in calm.replace("scattering", "")
    assert "take turns at the interpreter" in calm


def test_what_others_take_of_our_cores_is_counted_without_what_we_take(tmp_path):
    (tmp_path / "proc").mkdir()
    tick = os.sysconf("SC_CLK_TCK")

    def say(busy_s, elsewhere_s):
        cores = sorted(os.sched_getaffinity(0))
        lines = [f"cpu{core} {busy_s * tick} 0 0 9999 99 0 0 0 0 0" for core in cores]
        lines.append(f"cpu{cores[-1] + 1} {elsewhere_s * tick} 0 0 0 0 0 0 0 0 0")
        (tmp_path / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]) + "\n")

    say(100, 100)
    load = Load(tmp_path)
    assert load.others() == 0.0  # we took more than the nothing that the file shows
    say(10**9, 10**12)
    taken = load.others()
    assert taken is not None
    assert taken > 1.0
    assert Load(tmp_path / "nowhere").others() is None


def test_too_few_cores_are_told():
    assert "There are 2 cores for 4: some of the waiting is for a core." in _text(_comparison(_apart(), world_size=4))
    assert "some of the waiting" not in _text(_comparison(_apart()))


def test_where_stops_are_not_counted_none_are_told():
    unknown = Sample(0.013, {**FORWARD, "replicate": 0.0, "scatter": 0.0, "threads": 0.0}, 1.0)
    assert "stopping" not in _text(_comparison(unknown, ddp=Sample(0.012, FORWARD, 1.0)))


def test_the_table_has_a_row_per_contestant_and_a_dash_for_what_it_does_not_have():
    lines = list(as_text([_comparison(_contending())], 2))
    rows = [line for line in lines if line.startswith(("one process", "DataParallel", "DistributedDataParallel"))]
    assert len(rows) == len(CONTESTANTS)
    assert rows[0].split()[-7:] == ["-", "-", "-", "4.00", "0.00", "6.00", "1.00"]
    assert all(name in "".join(lines) for name in PARTS.values())


def test_json_has_every_round_and_the_sentences():
    comparison = _comparison(_contending())
    (told,) = json.loads(as_json([comparison], 2))["comparisons"]
    assert told["rounds"][DP][0]["parts"]["replicate"] == 0.012
    assert told["medians"][DDP]["step"] == 0.012
    assert told["explanation"] == list(explain(comparison, 2))


def test_the_picture_has_a_bar_per_contestant_as_long_as_its_step():
    text = draw([_comparison(_contending()), _comparison(_apart())])
    root = ET.fromstring(text)
    rests = [shape for shape in root.iter() if shape.get("fill") == "#c3cad2" and shape.get("height") == "20"]
    assert len(rests) == 2 * len(CONTESTANTS)
    widths = [float(shape.get("width")) for shape in rests[: len(CONTESTANTS)]]
    assert widths[2] == max(widths)
    assert widths[0] / widths[2] == pytest.approx(0.016 / 0.040, abs=0.01)
    assert "DistributedDataParallel, 2 processes" in text
