"""Which page holds which tokens: the table behind prefix reuse. Pure Python.

A page is found by its own tokens, the page before it, and a namespace (adapter, cache salt, image keys). Keys are
compared whole, not by a hash of them, so different prompts can never meet (C76).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_Key = tuple[object, ...]


class PrefixTable:
    """Maps chains of full pages to page numbers. The caller keeps pages alive and says when one is reused
    (`forget`).
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[_Key, tuple[int, int]] = {}  # key -> (page, serial number of this entry)
        self._keys: dict[int, _Key] = {}  # page -> its key
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def knows(self, page: int) -> bool:
        return page in self._keys

    def match(self, token_ids: Sequence[int], namespace: tuple[str, ...]) -> list[int]:
        """Pages of the longest known chain of full pages at the start of token_ids."""
        pages = []
        parent: object = namespace
        for tokens in self._chunks(token_ids):
            node = self._nodes.get((parent, tokens))
            if node is None:
                break
            page, parent = node
            pages.append(page)
        return pages

    def insert(self, pages: Sequence[int], token_ids: Sequence[int], namespace: tuple[str, ...]) -> None:
        """Enter full pages from the start of a sequence. What is known already keeps its page."""
        parent: object = namespace
        for page, tokens in zip(pages, self._chunks(token_ids), strict=False):
            key = (parent, tokens)
            if key not in self._nodes:
                if page in self._keys:
                    return  # this page was entered under a parent that has been forgotten since; its chain ends here
                self._nodes[key] = (page, self._next_serial)
                self._keys[page] = key
                self._next_serial += 1
            parent = self._nodes[key][1]

    def forget(self, page: int) -> None:
        """Remove a page that is about to hold other tokens. Pages after it can no longer be reached: their parent's
        serial is gone.
        """
        del self._nodes[self._keys.pop(page)]

    def _chunks(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            yield tuple(token_ids[start : start + self.page_size])
