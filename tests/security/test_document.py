"""What docs/security.md claims is held by tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "security.md"


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", DOCUMENT.read_text())
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (TESTS / path).read_text()]
    assert missing == []


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", DOCUMENT.read_text())
    assert [link for link in links if not (DOCUMENT.parent / link).exists()] == []
