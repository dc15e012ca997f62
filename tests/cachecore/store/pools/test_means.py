"""Means as pools have them: what their frames say, and what is believed of it."""

from dataclasses import replace

import pytest

from cachecore.holders import Pool, Tier
from cachecore.index.contract import Cleared, Removed, Stored
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools import Announcement
from cachecore.store.pools.means import Contexts, is_mean, tells_of_mean
from cachecore.transfer.errors import FrameError
from cachecore.transfer.frames import open_frame
from tests.cachecore.store.pools.means import KEYRING, LEAD, NAME, SHAPE, TOKENS, context, contexts, sealed
from tests.cachecore.store.pools.runs import make_run


def test_a_sketch_knows_its_contexts_and_few_others() -> None:
    eight = contexts(8)
    assert eight.number == 8
    assert all(context(number) in eight for number in range(8))
    mistaken = sum(context(number) in eight for number in range(1000, 6000))
    assert mistaken < 50
    assert context(1) not in contexts(1)
    assert "no context" not in eight


def test_a_frame_says_of_how_many_contexts_it_is_under_its_mac() -> None:
    three = contexts(3)
    frame = open_frame(sealed(three).buffers[0], KEYRING.frame_key)
    assert SHAPE.contexts_of(frame.header, NAME) == three
    assert frame.header.fidelity is Fidelity.FUSED
    assert (frame.header.tokens, frame.header.position, len(frame.token_ids)) == (TOKENS, LEAD, 4 * TOKENS)
    run = SHAPE.run(NAME, three)
    assert (run.key, run.first_block, run.parent) == (SHAPE.key(NAME), 3, three.sketch)


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, compatibility=b"x" * 16),
        replace(SHAPE, scope=b"x" * 16),
        replace(SHAPE, key_id=KeyId(TenantId("bob"), 7)),
        replace(SHAPE, kv_heads=1),
        replace(SHAPE, codec="i8"),
        replace(SHAPE, dtype="bfloat16"),
    ],
)
def test_a_frame_of_another_mean_is_not_taken(other: object) -> None:
    frame = open_frame(sealed(contexts(2)).buffers[0], KEYRING.frame_key)
    with pytest.raises(FrameError, match="where the mean of a text was to come"):
        other.contexts_of(frame.header, NAME)  # type: ignore[attr-defined]
    with pytest.raises(FrameError):
        SHAPE.contexts_of(frame.header, context(5))
    with pytest.raises(FrameError):
        SHAPE.contexts_of(frame.header._replace(first_block=0), NAME)


def test_gateways_hear_of_runs_and_not_of_means() -> None:
    mean, run = SHAPE.run(NAME, Contexts.of(context(1))), make_run(1)
    assert (is_mean(mean.key), is_mean(run.key)) == (True, False)
    holder = Pool("pool", 1)
    for event, silent in (
        (mean.stored(), True),
        (mean.removed(), True),
        (Removed(mean.chain, Tier.L2, Fidelity.FUSED), True),
        (run.stored(), False),
        (run.removed(), False),
        (Cleared(), False),
    ):
        assert isinstance(event, Stored | Removed | Cleared)
        assert tells_of_mean(Announcement(holder, event, None)) is silent
