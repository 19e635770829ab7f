"""Train the digits on one core and on two, compare the speed, and go on from the checkpoint.

One command shows what Phalanx does: `make demo`, or `python examples/demo.py` where it is installed.
"""

import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

DIGITS = Path(__file__).with_name("digits.py")
PHALANX = Path(sysconfig.get_path("scripts")) / "phalanx"
EPOCH = re.compile(r"^epoch .* ([\d,]+) samples/s", re.MULTILINE)
STEADY = 1.5  # on an idle machine the epochs of a run are within 1.2 times
ACCURACY = re.compile(r"^test accuracy ([\d.]+)", re.MULTILINE)


def train(folder: Path, ranks: int, *arguments: str) -> str:
    """Train with this many ranks of one thread each, at this terminal; gives back what rank 0 printed."""
    logs = folder / "logs"
    words = ["run", "--nproc-per-node", str(ranks), "--log-dir", str(logs), os.path.relpath(DIGITS), *arguments]
    print(f"\n$ phalanx {' '.join(words).replace(str(folder), '$TMP')}", flush=True)
    done = subprocess.run([str(PHALANX), *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"demo: the run above failed with exit code {done.returncode}")
    return (logs / "rank_0.log").read_text(encoding="utf-8")


def speed(log: str) -> float:
    """Samples per second of the whole job: the median of its epochs."""
    return statistics.median(float(rate.replace(",", "")) for rate in EPOCH.findall(log))


def scatter(log: str) -> float:
    """How many times as fast the fastest epoch is as the slowest, without the first, which warms up."""
    rates = [float(rate.replace(",", "")) for rate in EPOCH.findall(log)[1:]]
    return max(rates) / min(rates)


def main() -> None:
    """Run the three parts of the demo."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = train(folder, 1, "--checkpoint", str(folder / "one.pt"))
        two = train(folder, 2, "--checkpoint", str(folder / "two.pt"))
        more = train(folder, 2, "--checkpoint", str(folder / "two.pt"), "--resume", "--epochs", str(epochs(two) + 2))
    print(f"\none rank:   {speed(one):8,.0f} samples/s, test accuracy {accuracy(one)}")
    print(f"two ranks:  {speed(two):8,.0f} samples/s, test accuracy {accuracy(two)}")
    if scatter(one) < STEADY and scatter(two) < STEADY:
        print(f"two ranks train {speed(two) / speed(one):.2f} times as fast as one, each with one thread")
    else:
        print("the epochs of one run differ too much: other programs use these cores, and the speeds say nothing")
    print(f"resumed after epoch {epochs(two)} for {epochs(more)} more: test accuracy {accuracy(more)}")


def epochs(log: str) -> int:
    """How many epochs were trained."""
    return len(EPOCH.findall(log))


def accuracy(log: str) -> str:
    """The accuracy as it was printed."""
    return ACCURACY.findall(log)[-1]


if __name__ == "__main__":
    main()
