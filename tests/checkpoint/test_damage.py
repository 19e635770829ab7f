"""A checkpoint that is not what was written is an error, and so is one that lacks what is asked of it.

Of 300 checkpoints in which one bit was flipped, `load_checkpoint` took 257, among them ones with other weights:
torch.load does not look at the checksums that torch.save writes. And a checkpoint without the optimizer's state was
loaded without a word: training went on with moments of zero.
"""

import warnings

import pytest
import torch

from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.checkpoint.manifest import FileRecord, Manifest
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

STATE = {"model": {"weight": torch.arange(40.0), "bias": torch.ones(3)}, "epoch": 3, "name": "run"}


def as_bits(state):
    tensors = {name: tensor.view(torch.uint8).tolist() for name, tensor in state["model"].items()}
    return tensors, {name: value for name, value in state.items() if name != "model"}


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint with one bit of one tensor flipped; (its path, the tensor as it is in there)."""
    path = tmp_path / "run.pt"
    weight = torch.full((1000,), 2.0)
    save_checkpoint(path, {"weight": weight})
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 0x80
    path.write_bytes(content)
    weight[0] = -2.0
    return path, weight


def test_the_record_is_named(damaged):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(damaged[0])
    assert str(caught.value) == (
        f"load_checkpoint: {damaged[0]} is damaged: record 'archive/data/0' (4,000 bytes) does not match its checksum. "
        "Bits have changed since it was written, on the disk or in transit: copy it again or load an older checkpoint. "
        "verify=False reads it anyway."
    )


def test_what_is_left_of_it_can_be_read_on_request(damaged):
    path, weight = damaged
    assert torch.equal(load_checkpoint(path, verify=False)["weight"], weight)


def test_files_of_torch_save_pass_with_checksums_and_without(tmp_path):
    def save(rank, world_size):
        from torch.utils.serialization import config

        torch.save(STATE, tmp_path / "with.pt")
        config.save.compute_crc32 = False
        torch.save(STATE, tmp_path / "without.pt")

    run_ranks(save, 1, init=False)  # a setting of the whole process
    for name in ("with.pt", "without.pt"):
        assert as_bits(load_checkpoint(tmp_path / name)) == as_bits(STATE)


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "cudaa"])
def test_a_device_that_is_not_here_is_the_reason_given(tmp_path, device):
    """It said that the file is "not a checkpoint that can be opened safely"."""
    if torch.cuda.is_available() and device != "cudaa":
        pytest.skip("it is here")
    path = tmp_path / "run.pt"
    save_checkpoint(path, STATE)
    with pytest.raises(
        ValueError, match=rf"map_location='{device}' cannot be used in this process: \w.* Load to the CPU"
    ):
        load_checkpoint(path, map_location=device)
    assert load_checkpoint(path, map_location=torch.device("meta"))["model"]["bias"].is_meta


# --- into --------------------------------------------------------------------------------------------------------


def _go_on(rank, world_size, folder):
    """In a process of its own: torch's optimizers bring in its compiler, which sets environment variables."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    parts = {"model": model, "optimizer": torch.optim.AdamW(model.named_parameters())}
    said = []

    def load():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_checkpoint(folder / "run.pt", into=parts)
        said.append([str(warning.message).removeprefix(f"load_checkpoint: {folder}/run.pt: ") for warning in caught])

    def save(**parts):
        save_checkpoint(folder / "run.pt", {name: part.state_dict() for name, part in parts.items()})

    save(**parts)
    load()
    model[0](torch.ones(1, 2)).sum().backward()
    parts["optimizer"].step()
    save(**parts)
    load()
    model[1].requires_grad_(False)
    load()
    steps = parts["optimizer"].state_dict()["state"][0]["step"].item()
    before = model[0].weight.clone()
    save(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    try:
        load()
    except CheckpointError as error:
        said.append(str(error))
    assert torch.equal(model[0].weight, before)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    save(plain=plain)
    parts = {"plain": plain}
    load()
    return steps, said


def test_a_wrong_into_is_an_error_at_the_door(tmp_path):
    for into, message in ((torch.nn.Linear(1, 1), r"got a Linear"), ({"a": 3}, r"into\['a'\] is a int, which has no")):
        with pytest.raises(TypeError, match=message):
            load_checkpoint(tmp_path / "nothing.pt", into=into)


def test_what_a_checkpoint_lacks_is_said(tmp_path):
    ((steps, said),) = run_ranks(_go_on, 1, tmp_path, init=False)
    assert steps == 1.0
    fresh, some, frozen, lacking, plain = said
    assert fresh == [
        "'optimizer' has no state in the checkpoint, which was saved before its first step or without its state. It "
        "starts from scratch."
    ]
    assert some == [
        "'optimizer' has no state for 2 of 4 parameters ('1.weight', '1.bias'), which start from scratch: they had no "
        "gradient before the save, or their state was left out."
    ]
    assert lacking == (
        f"load_checkpoint: {tmp_path}/run.pt has no state for 'optimizer'; it has 'model'. Nothing was loaded. Leave "
        "out of `into` the objects that should start from scratch, or load a checkpoint that has their states."
    )
    assert frozen == plain == []


def test_optimizers_that_keep_one_state_or_none_in_a_group_lack_nothing(tmp_path):
    """Each load of an LBFGS, or of an SGD with momentum in some groups, warned of missing states."""
    for make in (
        torch.optim.LBFGS,
        lambda given: torch.optim.SGD([{"params": p, "momentum": 0.9 * n} for n, p in enumerate(given)], lr=0.1),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        optimizer = make(list(model.parameters()))

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum() ** 2
            loss.backward()
            return loss

        optimizer.step(closure)
        save_checkpoint(tmp_path / "run.pt", {"optimizer": optimizer.state_dict()})
        load_checkpoint(tmp_path / "run.pt", into={"optimizer": make(list(model.parameters()))})


@pytest.mark.parametrize("name", ["/etc/passwd", "../state.pt", "a/state.pt", "..", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(name):
    """Downloading a stranger's checkpoint wrote the file there."""
    manifest = Manifest("whole", 1, 1, "", torch.__version__, {name: FileRecord(4, 0)})
    with pytest.raises(ValueError, match="is not a valid file name in a checkpoint"):
        Manifest.decode(manifest.encode())
