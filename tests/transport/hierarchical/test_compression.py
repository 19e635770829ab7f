"""Rounding on the wire: what is sent is what the sender keeps, and what is lost can be kept for the next time."""

import logging
import math

import torch

from phalanx._base.core_numbers import AVG, MAX, SUM
from phalanx._comm.transport.hierarchical.compression import Compression


def test_what_is_sent_is_also_what_the_sender_keeps():
    view = torch.tensor([1.0, 1.0 + 2.0**-9, -3.14159])
    short = Compression(torch.bfloat16).shorten(view, None)
    assert short.dtype == torch.bfloat16
    assert torch.equal(view, short.float())


def test_only_sums_of_float32_are_rounded_and_only_when_asked():
    assert Compression(torch.bfloat16).rounds(torch.float32, AVG)
    assert not Compression(torch.bfloat16).rounds(torch.float32, MAX)  # it was: a maximum that no rank had
    assert not Compression(torch.bfloat16).rounds(torch.float64, SUM)
    assert not Compression(None).rounds(torch.float32, SUM)


def test_what_rounding_lost_is_added_the_next_time():
    compression = Compression(torch.bfloat16, error_feedback=True)
    value = 1.0 + 2.0**-9
    total = torch.zeros(3)
    for _ in range(8):
        buffer = torch.full((3,), value)
        lost = compression.begin(buffer, key=1)
        assert lost is not None
        total += compression.shorten(buffer, lost).float()
    assert abs(total[0].item() - 8 * value) <= 2.0**-8


def test_an_overflow_leaves_nothing_for_the_next_time():
    """inf - inf stayed: a GradScaler's first overflow made the tensor NaN for the rest of the run."""
    compression = Compression(torch.float16, error_feedback=True)
    for value in (math.inf, -math.inf, math.nan, 1e6, 1.0):
        buffer = torch.full((3,), value)
        short = compression.shorten(buffer, compression.begin(buffer, key=1))
    assert torch.equal(short, torch.ones(3, dtype=torch.float16))


def test_tensors_do_not_get_each_others_losses():
    compression = Compression(torch.bfloat16, error_feedback=True)
    first = torch.full((3,), 1.0 + 2.0**-9)
    compression.shorten(first, compression.begin(first, key=1))
    second = torch.ones(3)
    compression.begin(second, key=2)
    assert torch.equal(second, torch.ones(3))


def _train(compression, num_tensors, steps):
    """Each of some tensors once a step; how far the sum of what was sent is from the sum of what was meant."""
    value = 1.0 + 2.0**-9
    sent = torch.zeros(num_tensors)
    for _ in range(steps):
        for number in range(num_tensors):
            buffer = torch.full((3,), value)
            sent[number] += compression.shorten(buffer, compression.begin(buffer, key=number)).float()[0]
    return (sent - steps * value).abs()


def test_feedback_does_not_end_where_many_tensors_come_in_turn():
    """Residuals were kept for 64 tensors, and the one that had not come for longest was forgotten for the next: with
    65, that is each before it comes again. Feedback was off, and nothing said so."""
    assert _train(Compression(torch.bfloat16, error_feedback=True), 300, 8).max() <= 2.0**-8


def test_feedback_for_which_there_is_no_room_is_left_out_for_some_and_said(caplog):
    compression = Compression(torch.bfloat16, error_feedback=True, most_bytes=10 * 12)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        error = _train(compression, 15, 8)
    assert error[:10].max() <= 2.0**-8
    assert error[10:].min() > 2.0**-8
    assert [record.message for record in caplog.records if "10 tensors take 120 of at most 120 bytes" in record.message]


def test_tensors_that_do_not_come_any_more_make_room():
    compression = Compression(torch.bfloat16, error_feedback=True, most_bytes=10 * 12)
    _train(compression, 10, 2)
    later = torch.zeros(3)
    for _ in range(60):
        compression.begin(torch.ones(3), key=100)
    assert compression.begin(later, key=100) is not None
