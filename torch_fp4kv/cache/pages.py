"""Which pages of a pool each row holds, on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Pages:
    """Pages 0 … `count` - 1, which rows hold, alone or shared.

    Attributes:
        held: of each row its pages, in order. References and free pages follow from it, and are counted anew if an
            interrupt or an exception left a change halfway.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[int, list[int]] = {}
        self._count()

    def _count(self) -> None:
        self._references = [0] * self.count
        for pages in self.held.values():
            for page in pages:
                self._references[page] += 1
        self._free = [page for page in range(self.count)[::-1] if not self._references[page]]
        self._halfway = False

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        if self._halfway:
            self._count()
        self._halfway = True
        yield
        self._halfway = False

    @property
    def num_free(self) -> int:
        """Pages that no row holds."""
        if self._halfway:
            self._count()
        return len(self._free)

    def release(self, row: int) -> None:
        """Takes all pages from `row`, and the row out of `held`."""
        with self._changing():
            for page in self.held.pop(row):
                self._drop(page)

    def share(self, row: int, other: int, count: int) -> None:
        """`other` holds the first `count` pages of `row`, and no others."""
        with self._changing():
            pages = self.held[row][:count]
            for page in pages:
                self._references[page] += 1
            self.held[other] = pages

    def extend(self, row: int, count: int) -> None:
        """Gives `row` as many more pages, which must be free."""
        with self._changing():
            self.held[row] = [*self.held[row], *(self._take() for _ in range(count))]

    def is_shared(self, row: int, index: int) -> bool:
        """Whether another row holds page `index` of `row` too."""
        if self._halfway:
            self._count()
        return self._references[self.held[row][index]] > 1

    def replace(self, row: int, index: int, copy: Callable[[int, int], None]) -> None:
        """Gives `row` a page of its own in place of page `index`, after `copy(old, new)`."""
        with self._changing():
            old, new = self.held[row][index], self._take()
            copy(old, new)
            self.held[row][index] = new
            self._drop(old)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
