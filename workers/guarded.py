"""Hooks that raise nothing.

An exception in a hook of vLLM's scheduler ends its process, and with it the server; one in a thread of SGLang's ends
its request. A client's request must not be able to bring one about. Whatever goes wrong is a defect here: it is logged,
and the engine goes on as if we were not there.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger("ropeway.transfer")

_P = ParamSpec("_P")
_T = TypeVar("_T")


def guarded(otherwise: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """`otherwise` is what a hook answers that has failed: of the type that it answers anyway, and never changed."""

    def wrap(hook: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(hook)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return hook(*arguments, **named)
            except Exception:
                logger.exception("%s failed; the engine goes on without it", hook.__name__)
                return otherwise  # type: ignore[no-any-return]

        return call

    return wrap
