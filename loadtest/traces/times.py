"""Times as logs write them."""

import re
from datetime import UTC, datetime
from typing import Any

from loadtest.traces.rows import RowError

_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Since 1973, an epoch's nanoseconds, microseconds and milliseconds lie above these; what is smaller is seconds."""
_FRACTION = re.compile(r"(\.\d{6})\d+")


def seconds_of(value: Any) -> float:
    """Of a number (an epoch in whatever unit, or seconds from anywhere) or an ISO date. Raises RowError.

    Dates without a zone are UTC.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _of_date(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise RowError(f"{value!r} is no time")
    return float(value) * next((factor for least, factor in _UNITS if abs(value) >= least), 1.0)


def _of_date(text: str) -> float:
    try:
        moment = datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    except ValueError as error:
        raise RowError(f"{text!r} is no time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
