"""The core is built once for all Pythons: it must not depend on the one whose headers it was built with."""

import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "csrc"


def test_no_format_with_a_length_in_it():
    """Python 3.13's headers call another symbol for "s#" than 3.11's: a core from there ended in a SystemError here."""
    calls = re.compile(r'Py(?:Arg_Parse|_Build|Object_Call)\w*\([^;]*?"[^"]*#[^"]*"')
    found = {source.name: calls.findall(source.read_text()) for source in sorted(CORE.glob("*.c"))}
    assert found
    assert {name: calls for name, calls in found.items() if calls} == {}
