"""Rows that caches of sharded modules hold for a forward to come, which they pair with it by their order."""

from __future__ import annotations

from farandole.sparse._in_flight import InFlight


class PrefetchedRows:
    """Those of one batch at a time."""

    def __init__(self) -> None:
        self._held_for: InFlight | None = None

    def take(self, flying: InFlight, name: str) -> None:
        """A module's cache is about to take in rows for a batch: the next forward has to be that of this batch."""
        self.refuse(f"a prefetch for batch {flying.number}", flying)
        flying.prefetched.add(name)
        self._held_for = flying

    def refuse(self, what: str, now: InFlight | None = None) -> None:
        """
        Raises:
            RuntimeError: caches hold rows of a batch that is not the one ``now``.
        """
        held = self._held_for
        if held is None or held is now or not held.prefetched:
            return
        raise RuntimeError(
            f"{what} while {', '.join(sorted(held.prefetched))} holds rows that were prefetched for batch {held.number}: "
            "expected the forward of that batch first. Set prefetch_ahead = False one step before; where that forward "
            "has failed, make the caches anew and call drop_prefetched()"
        )

    def drop(self) -> None:
        """No cache holds rows for a forward to come."""
        if self._held_for is not None:
            self._held_for.prefetched.clear()
        self._held_for = None

    def forget(self, flying: InFlight) -> None:
        """After a forward, which has taken what its batch had."""
        if self._held_for is flying and not flying.prefetched:
            self._held_for = None
