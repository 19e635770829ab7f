"""Every encoding that Python knows gives the lines that were written, wherever a file is cut, or is refused."""

import random
from encodings.aliases import aliases

import pytest

from phalanx.mapreduce.map_reduce_job import require_line_encoding
from phalanx.mapreduce.records import read_blocks
from phalanx.mapreduce.splits import plan_file_splits

CODECS = sorted({*aliases.values(), "utf_8_sig", "idna", "punycode", "raw_unicode_escape", "unicode_escape"})
LETTERS = [
    *map(chr, {*range(0x20, 0x7F)} - {0x5C}),  # a backslash before a u means something in raw_unicode_escape
    *map(chr, range(0xA0, 0x180)),
    *map(chr, range(0x370, 0x600, 3)),
    *map(chr, range(0xE01, 0xE2F)),
    *map(chr, range(0x3041, 0x3097)),
    *map(chr, range(0x4E00, 0x9FFF, 97)),
    *map(chr, range(0xAC00, 0xD7A0, 97)),
    *map(chr, (0x0A0A, 0x0A0D, 0x1F600)),  # with the byte of a newline in UTF-16
]


def is_written(letter, codec):
    try:
        return letter.encode(codec).decode(codec) == letter
    except UnicodeError:
        return False


def is_taken(codec):
    try:
        require_line_encoding(codec)
    except ValueError as error:
        words = str(error)
        assert f"lines of {codec} cannot be found by a byte" in words or f"no text encoding {codec!r}" in words
        return False
    return True


@pytest.mark.parametrize("part", range(4))
def test_lines_of_every_encoding_that_is_taken_are_read_as_they_were_written(tmp_path, part):
    """ISO-2022-KR has a header: only the first block of a file was text, the others came as wrong letters."""
    draw, path = random.Random(part), tmp_path / "text"
    for codec in CODECS[part::4]:
        if not is_taken(codec):
            continue
        letters = [letter for letter in LETTERS if is_written(letter, codec)]
        assert letters, codec
        for _ in range(6):
            lines = ["".join(draw.choices(letters, k=draw.randint(0, 9))) for _ in range(draw.randint(1, 8))]
            data = "".join(f"{line}\n" for line in lines).encode(codec)
            path.write_bytes(data)
            splits = plan_file_splits([(str(path), len(data))], draw.randint(1, 40))
            found, bad = [], []
            for split in splits:
                for block in read_blocks(split, None, codec, draw.randint(1, 20)):
                    found += block.items
                    bad += block.bad
            assert (found, bad) == (lines, []), codec


def test_the_encodings_that_are_refused_are_these():
    no_text = {"base64_codec", "bz2_codec", "hex_codec", "quopri_codec", "rot_13", "uu_codec", "zlib_codec"}
    of_windows = {"mbcs", "oem"}
    wide = {f"utf_{bits}{order}" for bits in (16, 32) for order in ("", "_be", "_le")}
    ebcdic = {"cp037", "cp1026", "cp1140", "cp273", "cp424", "cp500"}
    with_state = {"iso2022_kr", "hz", "idna", "punycode", "unicode_escape", "utf_8_sig"}
    refused = {codec for codec in CODECS if not is_taken(codec)}
    assert refused - of_windows == no_text | wide | ebcdic | with_state
    for name in ("utf-8", "latin-1", "UTF8", "shift_jis", "gb18030", "iso-2022-jp", "utf-7", "cp1252", "euc_kr"):
        assert is_taken(name)
    assert not is_taken("undefined")
