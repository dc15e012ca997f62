"""`ropeway keys`: API keys in a file or a server, and the keyring that gateways share."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.arguments import command

if TYPE_CHECKING:
    from gateway.api_keys import ApiKeyRecord, KeyShelf
    from gateway.arguments import Subparsers


def add_keys(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "keys",
        "make, list and revoke API keys of tenants, and make the keyring that gateways share",
        """examples:
  ropeway keys new --tenant acme --file keys.jsonl
  ropeway keys revoke 3f9c0a81be42 --file keys.jsonl
  ropeway keys keyring --file keyring.json
  ropeway serve --api-keys keys.jsonl --worker http://127.0.0.1:8001

Running gateways follow the file, and a server's keys, within a second or two.""",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_new(actions)
    _add_list(actions)
    _add_revoke(actions)
    _add_keyring(actions)


def _add_new(actions: "Subparsers") -> None:
    new = command(
        actions,
        "new",
        "print a new key once and keep its hash",
        """examples:
  ropeway keys new --tenant acme --file keys.jsonl
  KEY=$(ropeway keys new --tenant acme --file keys.jsonl)
  ropeway keys new --tenant acme --redis redis://127.0.0.1 --expires 2027-01-31 --requests-per-minute 600""",
    )
    new.add_argument("--tenant", required=True, metavar="NAME", help="letters, digits, '-' and '_', at most 64")
    _add_place(new, "made when it does not exist")
    new.add_argument("--expires", default="", metavar="DATE", help="its last day (UTC), or a time with its offset")
    new.add_argument("--note", default="", metavar="TEXT", help="kept beside it")
    new.add_argument("--requests-per-minute", type=float, metavar="N", help="of this key alone")
    new.add_argument("--tokens-per-minute", type=float, metavar="N", help="of this key alone")
    new.add_argument("--public", action="store_true", help="may ask to share KV with all tenants")
    new.add_argument("--json", action="store_true", help="print tenant, key and where its hash is as JSON")
    new.set_defaults(run=_run_new)


def _add_list(actions: "Subparsers") -> None:
    listed = command(
        actions,
        "list",
        "what is kept of each key; the keys themselves are kept nowhere",
        """example:
  ropeway keys list --file keys.jsonl
  ropeway keys list --redis redis://127.0.0.1 --json""",
    )
    _add_place(listed, "of keys")
    listed.add_argument("--json", action="store_true", help="print a JSON document a key")
    listed.set_defaults(run=_run_list)


def _add_revoke(actions: "Subparsers") -> None:
    revoked = command(
        actions,
        "revoke",
        "forget keys by their id, or all of a tenant's",
        """examples:
  ropeway keys revoke 3f9c0a81be42 --file keys.jsonl
  ropeway keys revoke --tenant acme --redis redis://127.0.0.1

Requests that have begun are answered to their end; whatever comes after is refused, on open connections as well.""",
    )
    revoked.add_argument("ids", nargs="*", metavar="ID", help="as 'ropeway keys list' shows it")
    revoked.add_argument("--tenant", action="append", default=[], metavar="NAME", help="all keys of a tenant")
    _add_place(revoked, "of keys")
    revoked.add_argument("--json", action="store_true", help="print what was kept of them as JSON documents")
    revoked.set_defaults(run=_run_revoke)


def _add_keyring(actions: "Subparsers") -> None:
    keyring = command(
        actions,
        "keyring",
        "make the secrets that gateways (and workers that name blocks themselves) have in common",
        """example:
  ropeway keys keyring --file keyring.json
  ropeway serve --keyring keyring.json --redis redis://127.0.0.1 --worker http://127.0.0.1:8001""",
    )
    keyring.add_argument("--file", required=True, type=Path, metavar="FILE", help="must not exist yet")
    keyring.add_argument("--json", action="store_true", help="print the file's name as JSON")
    keyring.set_defaults(run=_run_keyring)


def _add_place(parser: argparse.ArgumentParser, file_help: str) -> None:
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--file", type=Path, metavar="FILE", help=file_help)
    place.add_argument("--redis", metavar="URL", help="a server, as in tenants.api_keys_redis")
    parser.add_argument("--prefix", default="ropeway", help="sharing.prefix of the fleet (default: %(default)s)")


def _run_new(arguments: argparse.Namespace) -> int:
    from gateway import api_keys

    settings: dict[str, Any] = {
        "expires": arguments.expires,
        "note": arguments.note,
        "requests_per_minute": arguments.requests_per_minute,
        "tokens_per_minute": arguments.tokens_per_minute,
        "public": arguments.public,
    }
    if arguments.file is not None:
        place = str(arguments.file)
        key = api_keys.add_api_key(arguments.file, arguments.tenant, **settings)
    else:
        place, key = "the server", api_keys.new_api_key()
        record = api_keys.new_record(key, arguments.tenant, place, **settings)
        asyncio.run(api_keys.with_shelf(arguments.redis, arguments.prefix, lambda shelf: shelf.add(record)))
    if arguments.json:
        print(json.dumps({"tenant": arguments.tenant, "key": key, "file": arguments.file and str(arguments.file)}))
        return 0
    print(key)
    print(f"Keep it: {place} has its hash only. Running gateways know it within a second or two.", file=sys.stderr)
    return 0


def _run_list(arguments: argparse.Namespace) -> int:
    from gateway import api_keys

    async def kept(shelf: "KeyShelf") -> list["ApiKeyRecord"]:
        return [key.record for key in (await shelf.read()).values()]

    if arguments.file is not None:
        records = [key.record for key in api_keys.read_key_file(arguments.file).values()]
    else:
        records = asyncio.run(api_keys.with_shelf(arguments.redis, arguments.prefix, kept))
    _show(sorted(records, key=lambda record: (record.tenant, record.created)), arguments.json)
    return 0


def _run_revoke(arguments: argparse.Namespace) -> int:
    from gateway import api_keys
    from gateway.errors import StartupError

    ids, tenants = set(arguments.ids), set(arguments.tenant)
    if not ids and not tenants:
        raise StartupError("name the keys to revoke: by their ids, or --tenant NAME")

    def is_meant(record: "ApiKeyRecord") -> bool:
        return record.id in ids or record.tenant in tenants

    if arguments.file is not None:
        removed = api_keys.remove_from_file(arguments.file, is_meant)
    else:
        removed = asyncio.run(
            api_keys.with_shelf(arguments.redis, arguments.prefix, lambda shelf: shelf.remove(is_meant))
        )
    _show(removed, arguments.json)
    unknown = ids - {record.id for record in removed} | tenants - {record.tenant for record in removed}
    if unknown:
        raise StartupError(f"there is no such key: {', '.join(sorted(unknown))}")
    return 0


def _show(records: Sequence["ApiKeyRecord"], as_json: bool) -> None:
    import msgspec

    for record in records:
        if as_json:
            print(json.dumps({"id": record.id, **msgspec.to_builtins(record)}))
        else:
            limits = [
                f"{name.partition('_')[0]}/min {rate:g}"
                for name in ("requests_per_minute", "tokens_per_minute")
                if (rate := getattr(record, name)) is not None
            ]
            until = [f"until {record.expires}"] if record.expires else []
            public = ["public"] if record.public else []
            print("  ".join([record.id, record.tenant, record.created, *until, *limits, *public, record.note]).rstrip())


def _run_keyring(arguments: argparse.Namespace) -> int:
    from cachecore.scope import Keyring
    from gateway.errors import StartupError

    if arguments.file.exists():
        raise StartupError(f"{arguments.file} exists already: whoever uses it would lose their names")
    try:
        Keyring.generate().save(arguments.file)
    except OSError as error:
        raise StartupError(f"{arguments.file}: {error.strerror}") from error
    print(json.dumps({"file": str(arguments.file)}) if arguments.json else f"{arguments.file} is made; keep it secret.")
    return 0
