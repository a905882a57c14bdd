"""How much a search may still do: a number of evaluations, which repeats exactly, and a time limit, which does not."""

import time


class Clock:
    """Counts evaluations against two limits.

    Args:
        seconds: the time limit; None = none.
        evaluations: the most list schedules to try; None = no limit.
    """

    def __init__(self, seconds: float | None, evaluations: int | None) -> None:
        self.seconds, self.limit, self.used = seconds, evaluations, 0.0
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def share(self) -> float:
        """Returns how much of the tighter limit is used up, 1 or more where one is reached."""
        by_time = 0.0 if self.seconds is None else self.elapsed_s / self.seconds if self.seconds else 1.0
        if self.limit is None:
            return by_time
        by_count = self.used / self.limit if self.limit else 1.0
        return max(by_count, by_time if by_time >= 1 else 0.0)
