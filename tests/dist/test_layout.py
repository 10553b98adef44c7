from __future__ import annotations

import pytest

from moestro.dist.layout import Layout, split


@pytest.mark.parametrize(
    ("count", "ranks", "sizes"),
    [
        (30, 8, [4] * 6 + [3] * 2),
        (128, 6, [22] * 2 + [21] * 4),
        (60, 8, [8] * 4 + [7] * 4),
        (4, 8, [1] * 4 + [0] * 4),
        (0, 2, [0, 0]),
    ],
)
def test_c42_uneven_splits(count: int, ranks: int, sizes: list[int]) -> None:
    shares = split(count, ranks)
    assert [len(s) for s in shares] == sizes
    assert [i for s in shares for i in s] == list(range(count))


def test_layout_gives_the_rank_its_share() -> None:
    assert list(Layout(ep_size=4, rank=2).experts(8)) == [4, 5]
    assert Layout().is_single


def test_split_refuses_no_ranks() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        split(4, 0)
