"""Rounding on the wire: what is sent is what the sender keeps, and what is lost can be kept for the next time."""

import torch

from phalanx.backend.across_hosts.wire import Wire


def test_what_is_sent_is_also_what_the_sender_keeps():
    view = torch.tensor([1.0, 1.0 + 2.0**-9, -3.14159])
    short = Wire(torch.bfloat16).shorten(view, None)
    assert short.dtype == torch.bfloat16
    assert torch.equal(view, short.float())


def test_only_float32_is_shortened_and_only_when_asked():
    assert Wire(torch.bfloat16).rounds(torch.float32)
    assert not Wire(torch.bfloat16).rounds(torch.float64)
    assert not Wire(None).rounds(torch.float32)


def test_what_rounding_lost_is_added_the_next_time():
    wire = Wire(torch.bfloat16, error_feedback=True)
    value = 1.0 + 2.0**-9
    total = torch.zeros(3)
    for _ in range(8):
        buffer = torch.full((3,), value)
        lost = wire.begin(buffer, key=1)
        assert lost is not None
        total += wire.shorten(buffer, lost).float()
    assert abs(total[0].item() - 8 * value) <= 2.0**-8


def test_tensors_do_not_get_each_others_losses():
    wire = Wire(torch.bfloat16, error_feedback=True)
    first = torch.full((3,), 1.0 + 2.0**-9)
    wire.shorten(first, wire.begin(first, key=1))
    second = torch.ones(3)
    wire.begin(second, key=2)
    assert torch.equal(second, torch.ones(3))
