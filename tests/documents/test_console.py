"""What the copy button of a console block copies: docs/_site/console.py; `make docs` presses it in Chromium."""

from __future__ import annotations

import html
import importlib.util
import re

import pytest
from tests.documents.blocks import ROOT, blocks, documents

_spec = importlib.util.spec_from_file_location("console", ROOT / "docs" / "_site" / "console.py")
assert _spec is not None
assert _spec.loader is not None
console = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(console)


@pytest.mark.parametrize(
    ("block", "typed"),
    [
        ("$ a\n1\n\n$ b --c\n2\n3\n", "a\nb --c"),
        ("node-a$ a\nout\n", "a"),
        ("$ a \\\n    --b \\\n    --c\nout\n", "a \\\n    --b \\\n    --c"),
        (
            "$ cat > f.py <<'END'\nimport a\n\n$ no prompt\nEND\nout\n$ b\n",
            "cat > f.py <<'END'\nimport a\n\n$ no prompt\nEND\nb",
        ),
        ("$ cat <<A > f\n> 1\n> A\nout\n", "cat <<A > f\n1\nA"),
        ("$ python -c '\nprint(1)\n'\n1\n", "python -c '\nprint(1)\n'"),
        ("$ echo \"it's\"\nit's\n", 'echo "it\'s"'),
        ("$ a  # what it's for\nit's\n", "a  # what it's for"),
        ("$ for n in 1 2; do\n>   echo $n\n> done\n1\n2\n", "for n in 1 2; do\n  echo $n\ndone"),
        ("$ cat <<A\n it's\nA\nout\n", "cat <<A\n it's\nA"),
        ("$ a\n$5.00\n$ \n", "a"),
        ("no prompt\n", ""),
        ("", ""),
    ],
)
def test_the_commands_of_a_block_are_copied_without_prompts_and_output(block, typed):
    assert console.commands(block) == typed


def test_the_rendered_block_carries_its_commands():
    code = '<span class="gp">$ </span>echo <span>&lt;a&gt;</span> "b"\nout\n'
    rendered = f'<div class="highlight"><pre><code>{code}</code></pre></div>'
    (copied,) = re.findall('data-copy="([^"]*)"', console.on_page_content(rendered))
    assert html.unescape(copied) == 'echo <a> "b"'
    assert console.on_page_content(rendered.replace("$ ", "")) == rendered.replace("$ ", "")


def test_every_line_with_a_prompt_is_copied_and_no_other():
    seen = 0
    for document in documents():
        for block in blocks(document):
            typed = console.commands(block.code).splitlines()
            prompts = re.findall(r"^(?:[\w-]+)?\$ (.+)$", block.code, re.M)
            if block.language == "console" and len(prompts) == len(typed):
                assert typed == prompts
                seen += 1
    assert seen > 40
