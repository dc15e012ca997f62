"""Combinations of settings that are allowed, and seldom meant."""

from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.ports import is_loopback
from gateway.settings.sources import DEFAULT, Key, Problem, Sources, text_of


def suspicions(config: GatewayConfig, sources: Sources) -> list[Problem]:
    """Each with its place and a remedy."""

    def stated(key: Key) -> bool:
        """Whether it, or something in it, was said."""
        return sources.origin(key) != DEFAULT or any(known[: len(key)] == key for known in sources.origins)

    found = [*_open(config), *_without_effect(config, stated), *_missing_files(config), *_odd(config)]
    return [*sources.warnings, *(Problem(sources.place(key), text_of(key), message) for key, message in found)]


_Found = Iterator[tuple[Key, str]]


def _open(config: GatewayConfig) -> _Found:
    """What more can reach than may be meant."""
    if not is_loopback(config.host):
        if config.tenants.open:
            yield ("host",), "everyone who can reach it is served: set tenants.api_keys_file"
        for name in ("admin", "metrics"):
            listener = getattr(config, name)
            if listener.port is None and listener.key_file is None:
                yield (name,), f"its routes are off: set {name}.key_file, or a loopback {name}.host with a port"
    for name in ("admin", "metrics"):
        listener = getattr(config, name)
        if listener.port is not None and listener.key_file is None and not is_loopback(listener.host):
            yield (name, "host"), f"everyone who can reach it is let in: set {name}.key_file"
    if config.redis.startswith(("redis://", "redis+")) and "@" not in config.redis:
        yield ("redis",), "the server asks for no password"


def _without_effect(config: GatewayConfig, stated: Callable[[Key], bool]) -> _Found:
    for name in ("transfer", "admission"):
        section = getattr(config, name)
        if not section.enabled and any(stated((name, key)) for key in section.__struct_fields__ if key != "enabled"):
            yield (name,), f"{name}.enabled is false: the rest of it has no effect"
    if config.redis == "none" and stated(("sharing",)):
        yield ("sharing",), "without redis nothing is shared"
    if stated(("transfer",)) and config.transfer.enabled and not config.keys_are_shared:
        yield ("transfer",), "without a keyring that the workers have no KV is moved: set keyring"
    if config.prompts.template_defaults and not config.tokenizers:
        yield ("prompts", "template_defaults"), "without tokenizers no template is rendered here"
    if stated(("priorities", "level_seconds")) and not config.priorities.by_work:
        yield ("priorities", "level_seconds"), "it counts with priorities.by_work alone"
    for name in config.routing.shadow:
        if name == config.policy:
            yield ("routing", "shadow"), f"{name!r} decides already, and would only agree with itself"


def _missing_files(config: GatewayConfig) -> _Found:
    files: dict[Key, Path | None] = {
        ("keyring",): config.keyring,
        ("tenants", "api_keys_file"): config.tenants.api_keys_file,
        ("admin", "key_file"): config.admin.key_file,
        ("metrics", "key_file"): config.metrics.key_file,
        **{("tokenizers", model): directory for model, directory in config.tokenizers.items()},
    }
    for key, path in files.items():
        if path is not None and not path.exists():
            yield key, f"{path} does not exist on this machine"


def _odd(config: GatewayConfig) -> _Found:
    if not config.workers:
        yield ("workers",), "there are none: nothing is served until one is registered at /admin/workers"
    elif all(worker.draining for worker in config.workers):
        yield ("workers",), "all of them are draining: nothing is served"
    for name in ("admin", "metrics"):
        listener = getattr(config, name)
        if listener.port is not None and (listener.host, listener.port) == (config.host, config.port):
            yield (name, "port"), f"is the gateway's own port: leave {name}.port out"
    first_byte = config.timeouts.first_byte_seconds
    if first_byte is not None and first_byte < config.timeouts.connect_seconds:
        yield ("timeouts", "first_byte_seconds"), "is shorter than timeouts.connect_seconds"
    if config.probes.timeout_seconds > 5 * config.probes.interval_seconds:
        yield ("probes", "timeout_seconds"), "a worker that hangs is noticed late: it is many intervals"
