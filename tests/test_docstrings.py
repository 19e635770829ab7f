"""Docstrings have one spelling of section names, and public functions that take tensors say shapes and errors."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sources import tree as parse

pytestmark = pytest.mark.lint
PACKAGE = Path(__file__).parents[1] / "src" / "phalanx"

# As in the style guide: contract first, then these.
SECTIONS = {"Arguments", "Shape", "Cost", "Memory", "Numerics", "Steps", "Order", "Raises", "Source"}
BLOCKS = {"Arguments", "Raises"}  # their entries stand below them
# Other spellings of the same, and sections of other styles.
REFUSED = {
    "Arg", "Args", "Argument", "Attributes", "Bytes", "Complexity", "Costs", "Error", "Errors", "Example", "Examples",
    "Exceptions", "Inputs", "Keyword", "Notes", "Numeric", "Outputs", "Param", "Parameters", "Params", "Precision",
    "Raise", "Reference", "References", "Return", "Returns", "Shapes", "Sources", "Throws", "Usage", "Warns", "Yields",
}  # fmt: skip

# Where the public names are listed; what c10d calls of a process group is public, too.
ROOMS = ["", "_comm/backend", "checkpoint", "data", "ddp", "nn", "optim"]
PROCESS_GROUP = {f"phalanx._comm.backend.process_group.{name}" for name in ("collectives", "messages")}

# An attribute's docstring says what the attribute is: one that begins so has no subject.
NO_BEGINNING = {
    "About", "After", "And", "As", "At", "Because", "Before", "Below", "Between", "But", "By", "Else", "For", "From",
    "If", "In", "Into", "Of", "On", "Or", "Over", "Since", "So", "Than", "Then", "Through", "To", "Under", "Until",
    "Up", "When", "While", "With", "Within", "Without",
}  # fmt: skip

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def docstrings(module: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(parse(module)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield f"{module.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}", text


def test_section_names_have_one_spelling():
    wrong = []
    for place, text in docstrings_of_all():
        for line in text.splitlines():
            header = re.match(r"\s?([A-Za-z]+)(?: per \w+)?:(?: |$)", line)
            if not header:
                continue
            name = header[1]
            known = name.capitalize() in SECTIONS | REFUSED
            if known and (name not in SECTIONS or line != line.lstrip() or " per " in header[0]):
                wrong.append(f"{place}: {line}")
            elif name in BLOCKS and line != f"{name}:":
                wrong.append(f"{place}: the entries of {name} stand below it")
    assert wrong == []


def test_no_docstring_of_an_attribute_begins_with_a_preposition_or_a_conjunction():
    places = [(place, text) for module in modules() for place, text in attribute_docstrings(module)]
    assert len(places) > 100
    assert [f"{place}: {text}" for place, text in places if re.split(r"\W", text.strip())[0] in NO_BEGINNING] == []


def attribute_docstrings(module: Path) -> Iterator[tuple[str, str]]:
    """A string after an assignment, in a module, a class or a function."""
    for node in ast.walk(parse(module)):
        body = getattr(node, "body", None)
        for first, second in itertools.pairwise(body if isinstance(body, list) else []):
            is_text = isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
            if isinstance(first, ast.Assign | ast.AnnAssign) and is_text and isinstance(second.value.value, str):
                yield f"{module.relative_to(PACKAGE)}:{second.lineno}", second.value.value


def docstrings_of_all() -> Iterator[tuple[str, str]]:
    for module in modules():
        yield from docstrings(module)


def public_names() -> dict[str, str]:
    """Each public name, and the module from which its room takes it."""
    names = {}
    for room in ROOMS:
        tree = parse(PACKAGE / room / "__init__.py")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phalanx."):
                names |= {alias.name: node.module or "" for alias in node.names}
    return names


def takes_tensors(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    arguments += [one for one in (function.args.vararg, function.args.kwarg) if one is not None]
    annotations = [one.annotation for one in arguments] + [function.returns]
    return any(one is not None and re.search(r"\bTensor\b", ast.unparse(one)) for one in annotations)


def public_tensor_functions() -> Iterator[tuple[str, str]]:
    """(name, docstring) of each; that of a method's class, or of a group's calls, counts for all of them."""
    names = public_names()
    for module in modules():
        dotted = ".".join(["phalanx", *module.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for node in parse(module).body:
            if isinstance(node, ast.FunctionDef) and names.get(node.name) == dotted and takes_tensors(node):
                yield node.name, ast.get_docstring(node) or ""
            is_call = isinstance(node, ast.FunctionDef) and dotted in PROCESS_GROUP and not node.name.startswith("_")
            if is_call and takes_tensors(node):
                text = f"{ast.get_docstring(parse(module)) or ''}\n{ast.get_docstring(node) or ''}"
                yield f"{dotted.split('.')[-1]}.{node.name}", text
            if not isinstance(node, ast.ClassDef):
                continue
            is_exported = dotted.startswith(names.get(node.name, "nowhere"))
            for method in node.body if is_exported else []:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and takes_tensors(method):
                    text = f"{ast.get_docstring(node) or ''}\n{ast.get_docstring(method) or ''}"
                    yield f"{node.name}.{method.name}", text


def test_a_public_function_that_takes_tensors_says_shapes_and_errors():
    functions = dict(public_tensor_functions())
    assert {"shared_empty", "SyncBatchNorm.forward", "messages.send"} <= functions.keys()
    for name, text in functions.items():
        for section in ("Shape", "Raises"):
            assert re.search(rf"^{section}:", text, re.MULTILINE), f"{name} has no section {section}:"
