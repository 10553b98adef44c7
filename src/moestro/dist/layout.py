"""Who owns what: how heads, widths and experts are split over ranks. Pure arithmetic, used by loader, dispatch and
planner alike."""

from __future__ import annotations

from dataclasses import dataclass


def split(count: int, num_ranks: int) -> list[range]:
    """Contiguous shares of `count` things: the first count % num_ranks ranks get one more (C42). Shares may be
    empty.
    """
    if count < 0 or num_ranks < 1:
        raise ValueError(f"cannot split {count} over {num_ranks} ranks")
    base, extra = divmod(count, num_ranks)
    shares, start = [], 0
    for rank in range(num_ranks):
        size = base + (rank < extra)
        shares.append(range(start, start + size))
        start += size
    return shares


@dataclass(frozen=True)
class Layout:
    """One rank's place: of tp_size tensor-parallel and ep_size expert-parallel ranks."""

    tp_size: int = 1
    ep_size: int = 1
    rank: int = 0

    def experts(self, num_experts: int) -> range:
        """Physical experts that this rank holds."""
        return split(num_experts, self.ep_size)[self.rank % self.ep_size]

    @property
    def is_single(self) -> bool:
        return self.tp_size == self.ep_size == 1
