"""Pages of the KV cache: who holds which, and what each one can be found by. Pure Python; the numbers index the device
tensors.

A page is free, held (one holder or several: a shared prefix), or idle: held by nobody but still findable by its tokens.
Idle pages are given out last, the one idle for longest first, and leave the prefix table at that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moestro.kv.prefix import PrefixTable


class PagePool:
    """A fixed number of pages of page_size tokens each.

    Pages of `allocate` and `share` belong to the caller until `release`; every page is released exactly as often as it
    was taken.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        assert num_pages >= 1
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefixes: PrefixTable | None = PrefixTable(page_size) if prefix_caching else None
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold num_tokens tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages for writing; None, and nothing taken, when there are not that many."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                assert self.prefixes is not None
                self.prefixes.forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def match(self, token_ids: Sequence[int], namespace: tuple[str, ...] = ()) -> list[int]:
        """Pages that hold the longest known prefix of token_ids, whole pages only, without taking them."""
        return [] if self.prefixes is None else self.prefixes.match(token_ids, namespace)

    def share(self, pages: Sequence[int]) -> None:
        """Take pages that `match` found, for reading."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody holds: sharing them makes that many fewer available."""
        return sum(self._holders[page] == 0 for page in pages)

    def register(self, pages: Sequence[int], token_ids: Sequence[int], namespace: tuple[str, ...] = ()) -> None:
        """Make full, computed pages findable. token_ids: the tokens of these pages from the start of the sequence."""
        if self.prefixes is not None:
            self.prefixes.insert(pages, token_ids, namespace)

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The last ones become free first, so that the start of a prefix stays findable for
        longest.
        """
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} released more often than taken"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self.prefixes is not None and self.prefixes.knows(page):
                    self._idle[page] = None
                else:
                    self._free.append(page)
