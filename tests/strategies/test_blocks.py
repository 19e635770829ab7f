"""Which parts of a model are sharded on their own, whatever is nested or shared in it."""

from torch import nn

from phalanx.strategies.sharded import find_blocks

WIDTH = 4


def test_blocks_are_the_repeated_parts_that_share_nothing():
    def linear():
        return nn.Linear(WIDTH, WIDTH)

    plain = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), linear()))
    assert find_blocks(plain) == [plain[0], plain[2]]
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([linear(), linear()]), linear()]), "b": linear()})
    assert find_blocks(nested) == [*nested["a"][0], nested["a"][1]]
    again = nn.ModuleList([layer := linear(), layer])
    assert find_blocks(again) == [layer]
    tied = nn.Sequential(nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear()))
    tied[0][0].weight = tied[1][1].weight  # the other layers are blocks, and these two are left to the whole
    assert find_blocks(tied) == [tied[0][1], tied[1][0]]
