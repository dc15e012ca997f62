"""What a gateway writes to stderr: its own log, and one line for each request where that is wanted.

All lines have one form (`logs.format`): text for people, logfmt or JSON for whatever collects them. Of a request there
are numbers, names and ids: never a prompt, an answer, a key, a session or an error's message, which may quote any.

Lines of requests are written a few dozen at a time: one write for each would cost more than all else.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.config import GatewayConfig, LogFormat
from gateway.edge.contract import Ending
from gateway.edge.http1 import RequestHead
from gateway.errors import ServiceError
from policies.contract import Receipt

FLUSH_SECONDS = 0.05
LINES_MAX = 256
"""More are written at once."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGER = "ropeway.requests"
_FAILED_STATUS_MIN = 400
_TOLD_ELSEWHERE = (Ending.REFUSED, Ending.OVERTAKEN)
"""By `refused`; by the worker that answered."""

Fields = Mapping[str, Any]


def configure(config: GatewayConfig) -> None:
    """Log to stderr from here on, in this form and from this level up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_TEXT) if config.logs.format == "text" else _Formatter(config.logs.format))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    for library in ("httpx", "httpcore"):  # they tell addresses and header fields
        logging.getLogger(library).setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    """A record as fields."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._write = _FORMS[form]

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self._write(fields)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(fields: Fields) -> str:
    return orjson.dumps(fields).decode()


def _logfmt(fields: Fields) -> str:
    return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items() if value is not None)


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else f"{value}"
    plain = text and text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else orjson.dumps(text).decode()


def _text(fields: Fields) -> str:
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    rest = {name: value for name, value in fields.items() if name not in ("time", "level", "logger")}
    return f"{stamp} {fields['level'].upper()} {_LOGGER}: {_logfmt(rest)}"


_FORMS: Mapping[LogFormat, Callable[[Fields], str]] = {"text": _text, "logfmt": _logfmt, "json": _json}


class RequestLog:
    """One line a request. `errors_only`: of those alone that got no whole answer, or an error."""

    def __init__(self, form: LogFormat, errors_only: bool, write: Callable[[str], object] | None = None) -> None:
        self._form = _FORMS[form]
        self._errors_only = errors_only
        self._write = write or _to_stderr
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def ended(
        self, receipt: Receipt, ending: Ending, status: int, seconds: float, size_bytes: int, output_tokens: int
    ) -> None:
        """A request that was given to a worker."""
        failed = ending is not Ending.COMPLETE or status >= _FAILED_STATUS_MIN
        if ending in _TOLD_ELSEWHERE or (self._errors_only and not failed):
            return
        chosen = receipt.candidate
        self._add(
            "warning" if failed else "info",
            {
                "request_id": receipt.request_id,
                "tenant": receipt.tenant,
                "model": receipt.model,
                "status": status,
                "ending": ending.value,
                "worker": chosen.worker,
                "policy": receipt.policy,
                "prompt_tokens": receipt.query.prompt_tokens,
                "matched_tokens": chosen.matched_tokens,
                "cached_tokens": receipt.reported_cached_tokens,
                "output_tokens": output_tokens or None,
                "ttft_ms": _rounded(receipt.seen_ttft_ms),
                "duration_ms": _rounded(seconds * 1e3),
                "bytes": size_bytes,
            },
        )

    def refused(self, head: RequestHead | None, path: str, error: ServiceError, client: str) -> None:
        """A request that was answered with an error of ours."""
        method = head.method.decode("latin-1") if head is not None else None
        fields = {"status": error.status, "code": error.code, "method": method, "path": path or None, "client": client}
        self._add("warning", fields)

    def served(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request that is not inference."""
        if status >= _FAILED_STATUS_MIN or not self._errors_only:
            fields = {"status": status, "method": method, "path": path, "duration_ms": _rounded(seconds * 1e3)}
            self._add("warning" if status >= _FAILED_STATUS_MIN else "info", fields)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            text = "".join(f"{line}\n" for line in self._lines)
            self._lines = []
            self._write(text)

    def _add(self, level: str, fields: Fields) -> None:
        self._lines.append(self._form({"time": _time(time.time()), "level": level, "logger": _LOGGER, **fields}))
        if len(self._lines) >= LINES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
