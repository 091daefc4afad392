"""The order in which a module's layers run, learnt from seeing them run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class LayerOrder:
    """Who follows whom in a pass, and who comes first.

    Layers are counted over all groups. Until a pass was seen, the layers of a group are taken to
    follow one another, and none to follow the last of a group.
    """

    def __init__(self, group_sizes: Sequence[int]) -> None:
        self.first: int | None = None
        self.known = False
        """Whether a whole pass was seen."""
        self.passes_left = 0
        self._next: dict[int, int] = {}
        start = 0
        for size in group_sizes:
            self._next |= {i: i + 1 for i in range(start, start + size - 1)}
            start += size
        self._entered: set[int] = set()
        self._running: int | None = None

    def begin(self, passes: int) -> None:
        """A use of so many passes begins."""
        self.passes_left = passes
        self._entered.clear()
        self._running = None

    def enter(self, i: int) -> bool:
        """Layer `i` runs. Whether what was known of the order changed."""
        changed = False
        if i in self._entered:  # a layer runs once a pass: this is the next pass
            self.passes_left -= 1
            changed = self.end_pass()
            self._entered.clear()
        elif self._running is not None and self._next.get(self._running) != i:
            self._next[self._running] = i
            changed = True
        if not self._entered:
            self.first = i
        self._entered.add(i)
        self._running = i
        return changed

    def end_pass(self) -> bool:
        """No layer follows the one that ran last. Whether that was known."""
        if self._running is None:
            return False
        self.known = True
        return self._next.pop(self._running, None) is not None

    def interrupt(self) -> None:
        """The pass under way was broken off: where it ended says nothing of the order."""
        self._running = None

    def is_last(self, i: int) -> bool:
        return i not in self._next

    def after(self, i: int) -> Iterator[int]:
        """The layers behind `i` in its pass, each once: what two passes in different orders have
        taught may go round."""
        seen = {i}
        at = self._next.get(i)
        while at is not None and at not in seen:
            yield at
            seen.add(at)
            at = self._next.get(at)
