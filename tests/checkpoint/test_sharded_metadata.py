"""Torch's `.metadata`, as each Python pickles it, and as an attacker would.

On Debian 12's Python 3.11.2 no sharded checkpoint could be read, not even one that it had written itself: Enums of
Python 3.11.0 to 3.11.3 are pickled as `getattr(class, name)`. A file of Python 3.13 with a path in it could not be read
on an older one. And whatever torch's module imports for itself (`os`, `torch`, `dataclass`) could be named by a file.
"""

import collections
import contextlib
import itertools
import pathlib
import pickle
import random
import struct
from enum import EnumMeta

import pytest
import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.checkpoint.sharded_metadata import decode_metadata

FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def by_value(member, _):
    return type(member), (member.value,)


def by_name(member, _):
    return getattr, (type(member), member.name)


def everything():
    """A Metadata with all that torch puts into one."""
    tensors, places = {}, {}
    for number, (form, dtype) in enumerate(itertools.product(FORMATS, (torch.float32, torch.bfloat16, torch.int64))):
        chunks = [ChunkStorageMetadata(torch.Size([3 * half, 0]), torch.Size([3, 5])) for half in range(2)]
        properties = TensorProperties(dtype=dtype, requires_grad=True, memory_format=form)
        tensors[f"w{number}"] = TensorStorageMetadata(properties, torch.Size([6, 5]), chunks)
        for half in range(2):
            places[MetadataIndex(f"w{number}", [3 * half, 0], half)] = _StorageInfo(f"__{half}_0.distcp", number, 9)
    tensors["object"] = BytesStorageMetadata()
    meta = StorageMeta(pathlib.Path("/somewhere/else"), "save", None, ["a module"])
    planned = {"w0": ("model", 0, "w0"), "order": collections.OrderedDict(a=1), "prefix": _StoragePrefix("__0_")}
    return Metadata(tensors, planned, places, meta, "1.0.0")


@pytest.mark.parametrize("reduce", [by_value, by_name])
@pytest.mark.parametrize("protocol", [4, 5])
def test_members_of_an_enum_are_read_in_both_ways_in_which_pythons_write_them(monkeypatch, reduce, protocol):
    written = everything()
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    content = pickle.dumps(written, protocol)
    assert (b"getattr" in content) == (reduce is by_name)
    assert decode_metadata(content) == written
    # Torch 2.6 on Python 3.13 named the class by its home there.
    moved = content.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    if protocol == 4:
        frameless = moved[:2] + moved[11:]  # FRAME says a length, which is no longer true, and may be left out
        assert frameless.count(b"pathlib._local") == 1
        assert decode_metadata(frameless) == written


# --- an attacker ----------------------------------------------------------------------------------------------------

MODULES = {module.__name__: module for module in (torch, torch.serialization, collections, pathlib)}
MODULES |= {module.__name__: module for module in (metadata, filesystem)}
NEEDED = {
    metadata.__name__: {
        kind.__name__
        for kind in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties)
    }
    | {"TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    filesystem.__name__: {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
KINDS = [vars(MODULES[module])[name] for module, names in NEEDED.items() for name in sorted(names)]
GETATTR = pickle.GLOBAL + b"builtins\ngetattr\n"


def text(word):
    return pickle.BINUNICODE + struct.pack("<I", len(word.encode())) + word.encode()


def named(value):
    """The opcodes that put a class, function or dtype that may be named onto the stack."""
    module, name = next((m, n) for m, names in NEEDED.items() for n in names if vars(MODULES[m])[n] is value)
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def getattr_of(what, name):
    return GETATTR + what + text(name) + pickle.TUPLE2 + pickle.REDUCE


def refusal(opcodes):
    """Return the refusal of a pickle, or None if it was read."""
    try:
        decode_metadata(opcodes + pickle.STOP)
    except pickle.UnpicklingError as error:
        return None if str(error).startswith("it is a ") else str(error)
    raise AssertionError("this is no Metadata")


def test_only_what_torch_writes_can_be_named_and_nothing_that_its_modules_import():
    for module, holds in MODULES.items():
        for name in [*vars(holds), "os.system", "torch.load", "Path.home", ""]:
            said = refusal(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            assert (said is None) == (name in NEEDED[module]), (module, name, said)
            assert said is None or said == f"it holds {module}.{name}, which no .metadata of torch does"
    others = ("builtins", "__builtin__", "os", "posix", "subprocess", "sys", "copyreg", "functools", "operator")
    for module, name in itertools.product(others, ("eval", "exec", "getattr", "system", "Popen", "partial", "modules")):
        said = refusal(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        assert (said is None) == ((module, name) == ("builtins", "getattr"))


def test_getattr_reaches_the_members_of_an_enum_and_nothing_else():
    for kind in KINDS:
        members = set(kind.__members__) if isinstance(kind, EnumMeta) else set()
        for name in {*dir(kind), *dir(type(kind)), "mro", "__class__", "__subclasses__", "a.b", ""}:
            said = refusal(getattr_of(named(kind), name))
            assert (said is None) == (name in members), (kind, name, said)
            assert said is None or "it asks for getattr(" in said
    member = getattr_of(named(_MEM_FORMAT_ENCODING), NAMES[0])
    for name in dir(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST):
        assert "it asks for getattr(" in refusal(getattr_of(member, name))
    for name in dir(getattr):  # the function itself
        assert "it asks for getattr(" in refusal(getattr_of(GETATTR, name))
    for odd in (pickle.NONE, pickle.EMPTY_LIST, pickle.NEWTRUE, named(_MEM_FORMAT_ENCODING)):  # as the name
        opcodes = GETATTR + named(_MEM_FORMAT_ENCODING) + odd + pickle.TUPLE2 + pickle.REDUCE
        assert "it asks for getattr(" in refusal(opcodes)


def shared_state():
    """Return the attributes of all classes, functions and members that can be named: the whole process shares them."""
    everywhere = [*KINDS, getattr, *_MEM_FORMAT_ENCODING, torch.strided]
    return [(repr(one), dict(getattr(one, "__dict__", {}))) for one in everywhere]


def test_nothing_that_the_process_shares_can_be_changed():
    before = shared_state()
    member = getattr_of(named(_MEM_FORMAT_ENCODING), NAMES[0])
    layout = named(torch.serialization._get_layout) + text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE
    for target in (*map(named, KINDS), GETATTR, member, layout):
        for attribute in ("__init__", "__setstate__", "__eq__", "_value_", "__defaults__", "open", "anything"):
            pair = text(attribute) + pickle.NONE
            state = pickle.EMPTY_DICT + pair + pickle.SETITEM
            for changes in (state, pickle.NONE + state + pickle.TUPLE2, state + state + pickle.TUPLE2):
                assert refusal(target + changes + pickle.BUILD).startswith("it changes ")
    assert shared_state() == before


@pytest.mark.slow(but=("0", "1", "2", "3", "4"))
@pytest.mark.parametrize("seed", range(20))
def test_random_opcodes_call_nothing_and_change_nothing(seed, capfd):
    """Programs of opcodes that fit together: each ends as a Metadata or as an exception, and nothing has happened."""
    draw = random.Random(seed)
    whole = pickle.dumps(everything(), 4)  # first, as copyreg notes the slots of a class in it
    before = shared_state()
    dangerous = [b"os\nsystem\n", b"builtins\neval\n", b"builtins\nexec\n", b"torch\nload\n", b"os\nremove\n"]
    dangerous += [f"{metadata.__name__}\n{name}\n".encode() for name in ("os", "torch", "dataclass", "Enum", "field")]
    pieces = [pickle.GLOBAL + one for one in dangerous] + [named(kind) for kind in KINDS] + [GETATTR]
    pieces += [text(word) for word in ("__class__", "__init__", "__subclasses__", "print(1)", "echo 1", *NAMES)]
    pieces += [pickle.NONE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.MARK, pickle.NEWTRUE]
    pieces += [pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.OBJ]
    pieces += [
        pickle.NEWOBJ_EX,
        pickle.SETITEM,
        pickle.APPEND,
        pickle.DUP,
        pickle.POP,
        pickle.STACK_GLOBAL,
        pickle.SETITEMS,
    ]
    pieces += [
        pickle.STACK_GLOBAL,
        pickle.EXT1 + b"\x01",
        pickle.PERSID + b"x\n",
        pickle.BINPERSID,
        pickle.NEXT_BUFFER,
        pickle.ADDITEMS,
    ]
    others = []
    for _ in range(50):
        opcodes = b"".join(draw.choices(pieces, k=draw.randint(1, 25))) + pickle.STOP
        at = draw.randrange(len(whole))
        for content in (opcodes, whole[:at] + opcodes, whole[:at] + draw.randbytes(3) + whole[at + 3 :]):
            with contextlib.suppress(Exception):
                found = decode_metadata(content)
                others.extend([found] if type(found) is not Metadata else [])
    assert others == []
    assert shared_state() == before
    assert capfd.readouterr() == ("", "")
