"""Public traces and reports, which are not part of the project: they lie at $ROPEWAY_SHARED, or beside the checkout."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("ROPEWAY_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def shared(*parts: str) -> Path:
    """A file or directory there; without it the test is skipped."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"there is no {path} (ROPEWAY_SHARED says where else to look)")
    return path
