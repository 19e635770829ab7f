"""An encoding is accepted if its lines can be found by a byte and decoded one by one."""

from encodings.aliases import aliases

import pytest

from phalanx.mapreduce.map_reduce_job import require_line_encoding

REFUSED = ["utf_16", "utf_32_be", "utf_8_sig", "utf_7", "cp037", "hz", "iso2022_kr", "idna", "unicode_escape", "rot_13"]


def is_accepted(codec):
    try:
        require_line_encoding(codec)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("codec", REFUSED)
def test_other_encodings_are_refused_by_name(codec):
    with pytest.raises(ValueError, match=f"lines of {codec} cannot be found by a byte"):
        require_line_encoding(codec)


def test_in_accepted_encodings_no_other_letter_has_the_byte_of_a_line_end():
    accepted = {codec for codec in aliases.values() if is_accepted(codec)}
    assert {"utf_8", "ascii", "latin_1", "iso8859_15", "cp1252", "shift_jis", "euc_kr", "gb18030"} <= accepted
    letters = "".join(map(chr, (*range(0x0A), *range(0x0B, 0xD800), 0x1F600)))
    for codec in accepted:
        assert "\n".encode(codec) == b"\n"
        assert b"\n" not in letters.encode(codec, "ignore"), codec
