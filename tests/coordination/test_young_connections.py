"""Who is closed first, compared with a list that is looked through."""

import random
from collections import Counter

import pytest

from phalanx.coordination.young_connections import HONEST, YoungConnections


def expected_choice(noted):
    """The oldest of the network with the most, or the oldest of all; of networks with as many, any."""
    counts = Counter(network for _, network in noted)
    most = max(counts.values())
    if most <= HONEST:
        return {noted[0][0]}
    return {next(fd for fd, network in noted if network == one) for one, count in counts.items() if count == most}


@pytest.mark.parametrize("num_networks", [1, 3, 40])
def test_the_choice_is_that_of_a_list_that_is_looked_through(num_networks):
    rng = random.Random(num_networks)
    young, noted = YoungConnections(), []
    for step in range(800):
        if noted and rng.random() < 0.45:
            fd = rng.choice(noted)[0] if rng.random() < 0.8 else step + 10**6
            young.discard(fd)
            noted = [one for one in noted if one[0] != fd]
        else:
            network = str(rng.randrange(num_networks))
            young.add(step, network, float(step))
            noted.append((step, network))
        assert len(young) == len(noted)
        assert young.most == max(Counter(network for _, network in noted).values(), default=0)
        if noted:
            assert young.choose() in expected_choice(noted)
            assert young.older_than(10.0, float(step)) == [fd for fd, _ in noted if step - fd > 10]


def test_where_each_address_has_few_the_oldest_of_all_goes_first():
    """An honest host opens two; of a thousand addresses with one each, it was the one with the most."""
    young = YoungConnections()
    for fd in range(100):
        young.add(fd, f"stranger {fd}", 0.0)
    for fd in (100, 101):
        young.add(fd, "honest", 1.0)
    young.add(102, "stranger 102", 2.0)
    assert young.choose() == 0
