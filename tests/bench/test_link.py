import pytest

from phalanx._tools.bench.link import LinkMeasurement, as_option, find_link, slowest
from phalanx.collectives import Link


def test_a_link_is_found_although_a_burst_passes_faster():
    def seconds(nbytes):
        return 50e-6 + max(0, nbytes - 2**18) / 1e8

    link = find_link({n: seconds(n) for n in (8, 2**16, 2**20, 2**23)})
    assert link.latency_s == pytest.approx(50e-6)
    assert link.bytes_per_s == pytest.approx(1e8)


def test_times_that_make_no_sense_still_make_a_link():
    assert find_link({8: 1e-3, 2**20: 2e-3, 2**23: 1e-3}) == Link(1e-3, 2**23 / 1e-3)
    assert find_link({8: 1e-4, 2**20: 1e-2}).latency_s == 1e-4


def test_the_slowest_link_is_the_one_to_reckon_with():
    links = [Link(1e-5, 1e9), Link(1e-4, 2e9)]
    assert slowest([LinkMeasurement(("a", "b"), link, {}) for link in links]) == Link(1e-4, 1e9)
    assert as_option(Link(1.2345e-4, 1.23456e9)) == (
        "phalanx.Options(link=phalanx.collectives.Link(latency_s=0.00012, bytes_per_s=1.23e+09))"
    )
