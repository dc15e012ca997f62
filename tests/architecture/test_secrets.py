"""No secret lies in the repository: keys and tokens of known forms, and what looks like a password in a value.

What it does not see: secrets of other forms, shorter than sixteen characters, in binary or very large files, or in
earlier commits.
"""

import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

KNOWN_FORMS = {
    "a private key": ("PRIVATE KEY", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}"),
    "an API key of this gateway": ("rwk_", r"\brwk_[A-Za-z0-9_-]{43}\b"),
    "an API key of OpenAI's or Anthropic's": ("sk-", r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}"),
    "a token of GitHub's": ("gh", r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{40}"),
    "a token of GitLab's": ("glpat-", r"\bglpat-[A-Za-z0-9_-]{20}"),
    "a token of Hugging Face's": ("hf_", r"\bhf_[A-Za-z0-9]{34}\b"),
    "a key of AWS's": ("A", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a key of Google's": ("AIza", r"\bAIza[A-Za-z0-9_-]{35}\b"),
    "a token of PyPI's or npm's": ("p", r"\bpypi-AgEI[A-Za-z0-9_-]{40}|\bnpm_[A-Za-z0-9]{36}\b"),
    "a token of Slack's": ("xox", r"\bxox[abprs]-[A-Za-z0-9-]{10}"),
    "a signed web token": ("eyJ", r"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{15,}"),
    "a password in a URL": ("://", r"://[^\s:/@'\"{}<>*]{0,64}:[A-Za-z0-9]{16,}@"),
}
"""What a text must contain at all, and a pattern."""
_PATTERNS = {what: (part, re.compile(pattern)) for what, (part, pattern) in KNOWN_FORMS.items()}
_VALUE = re.compile(r"""[:=]\s{0,3}["']([A-Za-z0-9+/_=-]{16,})["']""")
_NAMED_SECRET = re.compile(r"""(?:secret|token|password|passwd|api_?key|private_?key)s?["']?\s*$""", re.IGNORECASE)
ENTROPY_MIN_BITS = 3.4
"""A character, of a text whose characters are of all kinds."""
HEXADECIMAL_MIN = 32
FILE_BYTES_MAX = 1_000_000


def findings(name: str, text: str) -> list[str]:
    found = [
        (match.start(), what)
        for what, (part, pattern) in _PATTERNS.items()
        if part in text
        for match in pattern.finditer(text)
    ]
    found += [
        (match.start(), "what looks like a secret")
        for match in _VALUE.finditer(text)
        if _looks_random(match[1]) and _NAMED_SECRET.search(text[max(match.start() - 40, 0) : match.start()])
    ]
    return [f"{name}:{text.count(chr(10), 0, start) + 1}: {what}" for start, what in found]


def _looks_random(text: str) -> bool:
    if re.fullmatch("[0-9a-f]+", text):
        return len(text) >= HEXADECIMAL_MIN and len(set(text)) > HEXADECIMAL_MIN // 4
    kinds = all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return kinds and _entropy_bits(text) >= ENTROPY_MIN_BITS


def _entropy_bits(text: str) -> float:
    counts = Counter(text)
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())


def texts(repository: Path) -> Iterator[tuple[str, str]]:
    """All that would be committed, as far as it is text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = repository / name
        if path.is_file() and path.stat().st_size <= FILE_BYTES_MAX and b"\0" not in (data := path.read_bytes()):
            yield name, data.decode("utf-8", "replace")


def test_no_secret_lies_in_the_repository(repository: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("not a clone")
    assert [finding for name, text in texts(repository) for finding in findings(name, text)] == []


SAMPLES = {
    "a private key": "-----BEGIN EC " + "PRIVATE KEY-----\nMHcCAQEEIOxW1c5u7Jd2Zk9b\n",
    "an API key of this gateway": "rwk_" + "A1b2" * 10 + "xyz",
    "an API key of OpenAI's or Anthropic's": "sk-" + "proj-" + "a1B2" * 10,
    "a token of GitHub's": "ghp_" + "a1B2" * 9,
    "a token of GitLab's": "glpat-" + "a1B2" * 5,
    "a token of Hugging Face's": "hf_" + "aB" * 17,
    "a key of AWS's": "AKIA" + "ABCD" * 4,
    "a key of Google's": "AIza" + "a1B2c" * 7,
    "a token of PyPI's or npm's": "npm_" + "a1B2" * 9,
    "a token of Slack's": "xoxb-" + "1234567890",
    "a signed web token": ".".join(("eyJ" + "hbGciOiJIUzI1NiJ9", "eyJ" + "zdWIiOiIxMjM0NTY3", "dozjgNryP4J3jVmN")),
    "a password in a URL": "redis://user:" + "a1B2c3D4e5F6g7H8" + "@host",
}


@pytest.mark.parametrize("what", KNOWN_FORMS)
def test_each_form_is_found_by_its_line(what: str) -> None:
    assert findings("file", f"first line\n# {SAMPLES[what]}") == [f"file:2: {what}"]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('api_key = "' + "q8Zr3vX1mN7pL5tK" + '"', True),
        ("PASSWORD: '" + "q8Zr3vX1mN7pL5tK" + "'", True),
        ('api_key = "an-operator-key-0123456789"', False),
        ('token = "' + "0" * 32 + '"', False),
        ('password = os.environ["PASSWORD_1234567890"]', False),
    ],
)
def test_values_that_look_random(line: str, is_found: bool) -> None:
    assert bool(findings("file", line)) is is_found
