"""Request targets, written in one way: workers see the path that the gateway judged by."""

import re
from urllib.parse import unquote

_SLASHES = re.compile(rb"/{2,}")
_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


def normalize_target(target: bytes) -> tuple[bytes, str]:
    """A request target with one slash between segments and none at the end, and its path, percent-decoded.

    A worker decodes the path too, so the decoded one is the one to judge by.
    """
    origin = _ORIGIN.match(target)
    if origin is not None:
        target = target[origin.end() :]
    raw, mark, query = target.partition(b"?")
    raw = _one_slash(raw)
    path = raw.decode("latin-1")
    if "%" in path:
        path = _one_slash(unquote(path, "latin-1").encode("latin-1")).decode("latin-1")
    return raw + mark + query, path


def _one_slash(path: bytes) -> bytes:
    if b"//" in path:
        path = _SLASHES.sub(b"/", path)
    return path.rstrip(b"/") or b"/" if path.endswith(b"/") or not path else path
