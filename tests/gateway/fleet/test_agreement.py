"""Gateways that cannot be of one fleet are told apart before they share anything."""

import pytest

from cachecore.index.schema import Schema
from cachecore.scope import Keyring
from cachecore.store import RedisStore, StoreError, parse_address
from gateway.fleet.agreement import LAYOUT, Disagreement, agree, keyring_marks
from tests.cachecore.store.servers import Server, free_port


async def test_the_same_keyring_agrees(store: RedisStore, schema: Schema) -> None:
    keyring = Keyring.generate()
    await agree(store, schema, keyring)
    await agree(store, schema, keyring)


async def test_another_keyring_does_not(store: RedisStore, schema: Schema) -> None:
    await agree(store, schema, Keyring.generate())
    with pytest.raises(Disagreement, match="keyring: the gateways that share this index have another keyring"):
        await agree(store, schema, Keyring.generate())
    await agree(store, Schema("elsewhere"), Keyring.generate())


async def test_a_keyring_is_rotated_gateway_by_gateway(store: RedisStore, schema: Schema) -> None:
    old = Keyring.generate()
    rotated = old.rotate()
    without_the_old = Keyring({1: rotated.secrets_by_epoch[1]}, 1)
    for keyring in (old, rotated, old, rotated, without_the_old, rotated):
        await agree(store, schema, keyring)
    await agree(store, schema, without_the_old)
    with pytest.raises(Disagreement):
        await agree(store, schema, old)


async def test_another_layout_does_not(store: RedisStore, schema: Schema) -> None:
    await agree(store, schema, keyring := Keyring.generate())
    key = schema.fleet("agreement")
    written = await store.command(b"GET", key)
    await store.command(b"SET", key, written.replace(LAYOUT.encode(), b"0/8"))
    with pytest.raises(Disagreement, match="laid out as 0/8, by another version"):
        await agree(store, schema, keyring)


async def test_a_server_that_was_emptied_is_told_again(store: RedisStore, schema: Schema, valkey: Server) -> None:
    await agree(store, schema, Keyring.generate())
    valkey.command("FLUSHALL")
    await agree(store, schema, Keyring.generate())


async def test_nobody_disagrees_with_silence(schema: Schema) -> None:
    store = RedisStore(parse_address(f"redis://127.0.0.1:{free_port()}"))
    await store.start()
    with pytest.raises(StoreError):
        await agree(store, schema, Keyring.generate())
    await store.close()


def test_marks_hold_no_secret() -> None:
    keyring = Keyring.generate().rotate()
    marks = keyring_marks(keyring)
    assert {mark.partition(":")[0] for mark in marks} == {"0", "1"}
    assert all(len(mark.partition(":")[2]) == 12 for mark in marks)
    assert not any(secret.hex()[:12] in mark for mark in marks for secret in keyring.secrets_by_epoch.values())
