"""The configuration that a gateway starts with, and starts again with when its file changes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gateway.config import GatewayConfig
from gateway.errors import ConfigError
from gateway.settings.checking import check
from gateway.settings.sources import Kind, Origin, Problem, Sources


class Request(NamedTuple):
    """From where a configuration is read; the same ones can be read again."""

    path: Path | None = None
    overrides: Mapping[str, Any] = {}
    """Values by key path, over all else."""
    flags: Mapping[str, str] = {}
    """What said them, by key path, for messages."""


class Inspection(NamedTuple):
    """All that can be said of a configuration."""

    config: GatewayConfig | None
    """None where there is a problem."""
    sources: Sources
    problems: list[Problem]


def inspect(request: Request, environment: Mapping[str, str] | None = None) -> Inspection:
    """Read and check everything; raises nothing."""
    sources = Sources()
    if request.path is not None:
        sources.add_file(request.path)
    sources.add_variables(os.environ if environment is None else environment)
    for key, value in request.overrides.items():
        sources.put(key, value, Origin(Kind.FLAG, request.flags.get(key, "")))
    config, problems = check(sources)
    return Inspection(config, sources, problems)


def load(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
) -> GatewayConfig:
    """The configuration of a file, its variables in `environment` and `overrides` (by key path), each over the last.

    Raises ConfigError, whose message names the place and the key of the first problem.
    """
    return load_again(Request(path, overrides or {}, flags or {}), environment)


def load_again(request: Request, environment: Mapping[str, str] | None = None) -> GatewayConfig:
    """As `load`, from where it was loaded before."""
    config, _, problems = inspect(request, environment)
    if config is None:
        more = f" ({len(problems) - 1} more: 'ropeway config check' lists them)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more}")
    return config
