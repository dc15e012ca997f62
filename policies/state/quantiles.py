"""A quantile of the last so many values, as good as it need be for deciding how long to wait for something."""

from collections import deque
from math import ceil

VALUES_MAX = 512
VALUES_MIN = 32
"""Of fewer there is no telling."""
_STRIDE = 32
"""Values between two looks: they are sorted then."""


class RecentQuantile:
    def __init__(self, quantile: float) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError("a quantile lies in (0, 1]")
        self.quantile = quantile
        self._values: deque[float] = deque(maxlen=VALUES_MAX)
        self._observed = 0
        self.value: float | None = None
        """None until enough have been observed."""

    def __repr__(self) -> str:
        return f"RecentQuantile({self.quantile}: {self.value} of {self._observed})"

    def observe(self, value: float) -> None:
        self._values.append(value)
        self._observed += 1
        if self._observed % _STRIDE == 0 and len(self._values) >= VALUES_MIN:
            ordered = sorted(self._values)
            self.value = ordered[ceil(self.quantile * len(ordered)) - 1]
