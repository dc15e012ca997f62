"""Files that operators and others write: whatever they hold, reading ends as a value or as an error that says why."""

import json
import tempfile
from hashlib import sha256
from pathlib import Path
from random import Random

from cachecore.scope import Keyring
from gateway.api_keys import read_key_file
from gateway.errors import ConfigError
from gateway.settings.loading import load
from loadtest.traces.contract import TraceError
from loadtest.traces.reading import FORMATS_BY_NAME, read_trace
from tests.fuzz.engine import Target
from tests.loadtest.traces.test_mutations import LINES, ROWS

_DIRECTORY = Path(tempfile.mkdtemp(prefix="ropeway-fuzz-"))
_FILE = _DIRECTORY / "input"


def _written(data: bytes) -> Path:
    _FILE.write_bytes(data)
    return _FILE


# Configuration

_CONFIGS = [
    b"""host: 127.0.0.1
port: 8000
policy: kv-aware
workers:
  - url: http://127.0.0.1:9001
    name: a
  - {url: "http://10.0.0.2:9002", role: prefill, events: {endpoint: "tcp://10.0.0.2:5557"}}
limits: {body_bytes_max: 1000000, connections_max: 10}
timeouts:
  connect_seconds: 1.5
  idle_seconds: null
admission: {enabled: true, weights: {acme: 2.0}}
""",
    b"redis: embedded\nkeyring: /nowhere/keyring.json\ntokenizers: {m: /nowhere}\n",
    b"usage:\n  requested: yes\nlog_level: debug\nprompts: {template_defaults: {m: {a: 1}}}\n",
    b"a: &x [*x]\n",
    b"{}\n",
]
_CONFIG_WORDS = (
    b"\n", b": ", b"  ", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"<<: ", b"!!python/object:os.system",
    b"!!binary ", b"? ", b"null", b"~", b"yes", b".inf", b".nan", b"1e3", b"0o7", b"2001-01-01", b"|\n",
    b"%YAML 1.2\n---\n", b"---\n", b"\t", b"workers:", b"http://", b"[::1]:x", b"\xc2\x85", b"'", b'"', b"#",
    b"\xff",
)  # fmt: skip


def check_config(data: bytes, random: Random) -> None:
    try:
        load(_written(data), {})
    except ConfigError as error:
        if "\n" in f"{error}" or not f"{error}":
            raise AssertionError(f"an error is one line: {str(error)!r}") from error


# Traces

_TRACE_WORDS = (
    b"\n", b",", b'"', b"{", b"}", b"[", b"]", b":", b"null", b"true", b"1e400", b"-1", b"NaN", b'"timestamp":',
    b'"hash_ids":[1]', b'"messages":[]', b'"content":', b"2023-11-16 18:17:03.9799600", b"\r\n",
    b"\xef\xbb\xbf", b"\\ud800", b"[[[[",
)  # fmt: skip


def _trace_corpus() -> list[bytes]:
    rows = [json.dumps(row).encode() + b"\n" for row in ROWS.values()]
    return [*rows, *(text.encode() for text in LINES.values())]


def check_trace(data: bytes, random: Random) -> None:
    # Numbers as they are may ask for more than a fuzzer has: a trace's size is its reader's to choose.
    path = _written(data[:20_000])
    for name in (None, random.choice(list(FORMATS_BY_NAME))):
        try:
            read_trace(path, name)
        except TraceError as error:
            if str(path) not in str(error):
                raise AssertionError(f"an error names its file: {error}") from error


# Keys


def _keys_corpus() -> list[bytes]:
    digests = [sha256(name).hexdigest() for name in (b"a", b"b")]
    lines = [json.dumps({"tenant": "acme", "key_sha256": digest, "created": "2026-01-31"}) for digest in digests]
    return [("\n".join(["# keys", *lines, ""])).encode(), lines[0].encode(), b"# nothing\n"]


def check_keys(data: bytes, random: Random) -> None:
    try:
        keys = read_key_file(_written(data))
    except ConfigError as error:
        if str(_FILE) not in str(error):
            raise AssertionError(f"an error names its file: {error}") from error
        return
    for digest in keys:
        if len(digest) != 32 or digest.hex().encode() not in data.lower():
            raise AssertionError(f"a key that the file does not have: {digest.hex()}")


def _keyring_corpus() -> list[bytes]:
    return [json.dumps({"current": 1, "secrets": {"0": "ab" * 32, "1": "cd" * 40}}).encode()]


def check_keyring(data: bytes, random: Random) -> None:
    try:
        keyring = Keyring.load(_written(data))
    except ValueError:
        return
    if keyring.current_epoch not in keyring.secrets_by_epoch or min(map(len, keyring.secrets_by_epoch.values())) < 32:
        raise AssertionError(f"a keyring without a key: {keyring}")


_JSON_WORDS = (
    b'"',
    b"{",
    b"}",
    b":",
    b",",
    b"null",
    b"[]",
    b"\n",
    b"#",
    b'"expires":"2026-01-01"',
    b"\\u0000",
    b"1e999",
    b"public",
)
TARGETS = (
    Target("config", lambda: list(_CONFIGS), check_config, _CONFIG_WORDS),
    Target("traces", _trace_corpus, check_trace, _TRACE_WORDS),
    Target("api-keys", _keys_corpus, check_keys, _JSON_WORDS),
    Target("keyring", _keyring_corpus, check_keyring, _JSON_WORDS),
)
