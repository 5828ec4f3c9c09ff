"""What failed in a listener's round, so that it holds up nothing else: tried again after a pause that doubles."""

from __future__ import annotations

import time
from uuid import UUID

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


class Aside:
    """Sessions, runs and kinds of work that are set aside for a while. Times are seconds."""

    def __init__(self) -> None:
        self._until: dict[UUID | str, tuple[float, float]] = {}

    def put(self, what: UUID | str, *, longest: float = LONGEST_PAUSE) -> float:
        """Set it aside, and say for how long: ``longest`` at most."""
        _, pause = self._until.get(what, (0.0, FIRST_PAUSE / 2))
        pause = min(pause * 2, longest)
        self._until[what] = (time.monotonic() + pause, pause)
        return pause

    def forget(self, what: UUID | str) -> None:
        """It went well."""
        self._until.pop(what, None)

    def __contains__(self, what: UUID | str) -> bool:
        until, _ = self._until.get(what, (0.0, 0.0))
        return time.monotonic() < until

    def ids(self) -> list[UUID]:
        """The sessions and runs that are set aside now; those of long ago are forgotten."""
        now = time.monotonic()
        for what in [what for what, (until, pause) in self._until.items() if now > until + 2 * pause + LONGEST_PAUSE]:
            del self._until[what]
        return [what for what, (until, _) in self._until.items() if isinstance(what, UUID) and now < until]
