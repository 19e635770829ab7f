"""Which files speak of a word: an inverted index of a folder, each word with the files that have it, most often first.

phalanx run --nproc-per-node 2 examples/inverted_index.py docs/*/*.md --words gradient loss
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import phalanx
from phalanx.mapreduce import Records, map_reduce


def words(path):
    """The map function of a file; its paths are the records."""
    for word, times in Counter(re.findall(r"[a-z]{3,}", path.read_text().lower())).items():
        yield word, (times, path.name)


def ranked(word, places):
    """The reduce function: of a word, all (times, file)."""
    return sorted(places, key=lambda place: (-place[0], place[1]))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("files", nargs="+", type=Path)
parser.add_argument("--words", nargs="*", default=["gradient"])
arguments = parser.parse_args()

job = phalanx.init()
index = dict(map_reduce(Records(arguments.files), words, ranked, gather=True))
if job.is_main:
    print(f"{len(index):,} words in {len(arguments.files)} files")
    for word in arguments.words:
        places = index.get(word, [])
        print(f"{word}: " + ", ".join(f"{name} ({times})" for times, name in places[:5]))
