"""Lives that nobody counts but the gateways: all of them come to the same numbers."""

from cachecore.holders import Epoch, WorkerName
from cachecore.index.epochs import NO_EPOCH, OwnEpochs, SharedEpochs
from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address
from tests.cachecore.store.servers import Server, free_port

W = WorkerName("w:1")


async def test_a_gateway_by_itself_counts_from_one() -> None:
    assert await OwnEpochs().after(W, NO_EPOCH) == 1
    assert await OwnEpochs().after(W, Epoch(4)) == 5


async def test_whoever_saw_the_same_life_end_gets_the_same_one(store: RedisStore, schema: Schema) -> None:
    one, two = SharedEpochs(store, schema), SharedEpochs(store, schema)
    assert await one.after(W, NO_EPOCH) == 1
    assert await two.after(W, NO_EPOCH) == 1
    assert await one.after(W, Epoch(1)) == 2
    assert await two.after(W, Epoch(1)) == 2
    assert await two.after(W, Epoch(2)) == 3
    assert await one.after(W, NO_EPOCH) == 3, "a gateway that comes later"
    assert await one.after(WorkerName("w:2"), NO_EPOCH) == 1


async def test_without_the_server_lives_are_counted_on_and_told_later(schema: Schema, server: Server) -> None:
    away = RedisStore(parse_address(f"redis://127.0.0.1:{free_port()}"))
    await away.start()
    epochs = SharedEpochs(away, schema)
    assert await epochs.after(W, Epoch(6)) == 7
    await epochs.settle()
    await away.close()


async def test_a_server_that_was_emptied_learns_the_present_lives(
    store: RedisStore, schema: Schema, server: Server
) -> None:
    old, new = SharedEpochs(store, schema), SharedEpochs(store, schema)
    for over in range(3):
        await old.after(W, Epoch(over))
    server.command("FLUSHALL")
    await old.settle()
    assert await new.after(W, NO_EPOCH) == 3
    old.forget(W)
    server.command("FLUSHALL")
    await old.settle()
    assert await new.after(W, NO_EPOCH) == 1
