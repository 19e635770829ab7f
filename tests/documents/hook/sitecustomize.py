"""Every Python process of a page that is followed imports this: its warnings are also written to a file.

One line for each warning, the first of its message: those of the warnings module about the page's own code, torch or
Phalanx (what Lightning does with torch is not the page's), and what Phalanx logs.
"""

import logging
import os
import warnings

RECORD = os.environ["WARNINGS_OF_THE_PAGE"]
make, show = logging.getLogRecordFactory(), warnings.showwarning


def record(message):
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(str(message).strip().partition("\n")[0] + "\n")


def make_and_record(*words, **named):
    made = make(*words, **named)
    if made.levelno >= logging.WARNING and made.name.startswith("phalanx"):
        record(made.getMessage())
    return made


def show_and_record(message, category, filename, lineno, file=None, line=None):
    library = filename.partition("site-packages/")[2].partition("/")[0]
    if library in ("", "torch", "phalanx"):
        record(message)
    show(message, category, filename, lineno, file, line)


logging.setLogRecordFactory(make_and_record)
warnings.showwarning = show_and_record
