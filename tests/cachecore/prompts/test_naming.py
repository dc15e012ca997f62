"""Cached naming beside the naive one, on the same prompts."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachecore.blocks import pack_tokens
from cachecore.prompts.contract import NamedPrompt, PromptError, Rendered
from cachecore.prompts.naming import END_CHARACTERS_MIN, PromptNamer, Work
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming

PLAIN = PlainRenderer()
KEYRING = Keyring({0: bytes(range(32))}, 0)
NAMINGS = [
    Naming.of(IdentityScope(model, KeyId(DEFAULT_TENANT, 0), size), KEYRING) for model in "ab" for size in (4, 16)
]
LONG = "x" * END_CHARACTERS_MIN


class Counting(PlainRenderer):
    """Counts what it encodes."""

    def __init__(self, fingerprint: str = "counting") -> None:
        self.fingerprint = fingerprint
        self.encoded: list[str] = []

    def encode(self, segment: str) -> "array[int]":
        self.encoded.append(segment)
        return super().encode(segment)


def naive(naming: Naming, rendered: Rendered) -> NamedPrompt:
    tokens = [token for segment in rendered.segments for token in PLAIN.encode(segment)]
    return NamedPrompt(len(tokens), naming.hasher.chain(naming.root, pack_tokens(tokens)), rendered.complete)


SEGMENTS = st.lists(
    st.one_of(st.sampled_from(["", "a", "ab", "abcd", "é🙂", LONG, LONG + "y"]), st.text(max_size=9)), max_size=7
)


@settings(deadline=None)
@given(prompts=st.lists(st.tuples(SEGMENTS, st.sampled_from(NAMINGS), st.booleans()), max_size=20))
def test_cached_equals_uncached(prompts: list[tuple[list[str], Naming, bool]]) -> None:
    namer = PromptNamer(1 << 20)
    for segments, naming, complete in prompts * 2:
        rendered = Rendered(segments, complete)
        assert namer.name(PLAIN, naming, rendered) == naive(naming, rendered)
        ids = [token for segment in segments for token in PLAIN.encode(segment)]
        assert namer.tokens(PLAIN, naming, rendered).tolist() == ids


class UnderPressure(RuleBasedStateMachine):
    """A namer with room for a dozen nodes, works begun, finished late or never, all names still right."""

    def __init__(self) -> None:
        super().__init__()
        self.namer = PromptNamer(20_000)
        self.pending: list[tuple[object, NamedPrompt]] = []

    @rule(segments=SEGMENTS, naming=st.sampled_from(NAMINGS))
    def name(self, segments: list[str], naming: Naming) -> None:
        rendered = Rendered(segments)
        assert self.namer.name(PLAIN, naming, rendered) == naive(naming, rendered)

    @rule(segments=SEGMENTS, naming=st.sampled_from(NAMINGS))
    def at_once(self, segments: list[str], naming: Naming) -> None:
        rendered = Rendered(segments)
        begun = self.namer.begin(PLAIN, naming, rendered)
        if isinstance(begun, Work):
            self.pending.append((begun, naive(naming, rendered)))
        else:
            assert begun == naive(naming, rendered)

    @rule(segments=SEGMENTS, naming=st.sampled_from(NAMINGS))
    def begin(self, segments: list[str], naming: Naming) -> None:
        rendered = Rendered(segments)
        self.pending.append((self.namer.look_up(PLAIN, naming, rendered), naive(naming, rendered)))

    @rule(index=st.integers(0, 5))
    def finish(self, index: int) -> None:
        if index < len(self.pending):
            work, expected = self.pending.pop(index)
            assert work.compute() == expected
            self.namer.insert(work)

    @invariant()
    def accounts_add_up(self) -> None:
        namer = self.namer
        nodes, stack = [], list(namer._top.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack += node.children.values()
        leaves = {node for node in nodes if not node.children}
        assert leaves == set(namer._new_leaves) | set(namer._kept_leaves)
        assert not set(namer._new_leaves) & set(namer._kept_leaves)
        assert namer._tree_bytes == sum(node.size_bytes for node in nodes) <= 15_000
        assert namer._kept_bytes == sum(node.size_bytes for node in nodes if node.met_again)
        assert namer.counters.nodes == len(nodes)
        assert namer.counters.bytes == namer._tree_bytes + namer._tokens._bytes <= 20_000


TestUnderPressure = UnderPressure.TestCase
TestUnderPressure.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


TURNS = ["<|system|>\nBe brief.\n", "<|user|>\nFirst?\n", "<|assistant|>\nYes.\n", "<|user|>\nSecond?\n"]
ANSWER = "<|assistant|>\n"


def test_a_next_turn_pays_for_its_tail_only() -> None:
    """For its tail, and for the question before, whose end was too short to be remembered."""
    namer, renderer = PromptNamer(1 << 20), Counting()
    namer.name(renderer, NAMINGS[0], Rendered([*TURNS[:2], ANSWER]))
    assert len(renderer.encoded) == 3
    renderer.encoded.clear()
    rendered = Rendered([*TURNS, ANSWER])
    work = namer.look_up(renderer, NAMINGS[0], rendered)
    assert work.missing_characters == sum(map(len, TURNS[1:]))
    named = work.compute()
    namer.insert(work)
    assert renderer.encoded == TURNS[1:]
    assert named == naive(NAMINGS[0], rendered)
    assert namer.look_up(renderer, NAMINGS[0], rendered).missing_characters == len(TURNS[3])
    assert (namer.counters.hits, namer.counters.encoded_characters) == (
        1 + 3,
        sum(map(len, [*TURNS, ANSWER, TURNS[1]])),
    )


def test_a_long_question_is_remembered() -> None:
    namer, renderer = PromptNamer(1 << 20), Counting()
    question = "<|user|>\n" + LONG
    namer.name(renderer, NAMINGS[0], Rendered([TURNS[0], question, ANSWER]))
    renderer.encoded.clear()
    namer.name(renderer, NAMINGS[0], Rendered([TURNS[0], question, *TURNS[2:], ANSWER]))
    assert renderer.encoded == TURNS[2:]


def test_a_short_end_is_named_at_once() -> None:
    namer, renderer = PromptNamer(1 << 20), Counting()
    first = Rendered([*TURNS[:2], ANSWER])
    work = namer.begin(renderer, NAMINGS[0], first)
    assert isinstance(work, Work)
    work.compute()
    namer.insert(work)
    renderer.encoded.clear()
    counters = replace(namer.counters)
    for rendered in (first, Rendered([TURNS[0], TURNS[3], ANSWER], complete=False)):
        assert namer.begin(renderer, NAMINGS[0], rendered) == naive(NAMINGS[0], rendered)
    assert renderer.encoded == [TURNS[1], TURNS[3]]
    assert namer.counters.nodes == counters.nodes
    assert namer.counters.hits == counters.hits + 2
    assert isinstance(namer.begin(renderer, NAMINGS[0], Rendered([TURNS[0], LONG, ANSWER])), Work)


def test_a_prompt_that_is_a_short_end_altogether() -> None:
    namer = PromptNamer(1 << 20)
    rendered = Rendered([TURNS[1], ANSWER])
    for _ in range(2):
        assert namer.name(PLAIN, NAMINGS[0], rendered) == naive(NAMINGS[0], rendered)
    assert namer.begin(PLAIN, NAMINGS[0], rendered) == naive(NAMINGS[0], rendered)
    assert namer.counters.nodes == 1, "the root alone"


def test_roots_never_share() -> None:
    rendered = Rendered([LONG, LONG + "y"])
    namer = PromptNamer(1 << 20)
    chains = {namer.name(PLAIN, naming, rendered).chain for naming in NAMINGS}
    assert len(chains) == len(NAMINGS)
    assert namer.counters.hits == 0
    # The same root with another renderer is another root: its tokens may differ.
    renderer = Counting("other")
    namer.name(renderer, NAMINGS[0], rendered)
    assert renderer.encoded == [LONG, LONG + "y"]
    assert namer.counters.hits == 0


def test_equal_hashes_of_segments_are_not_enough() -> None:
    class Colliding(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    namer = PromptNamer(1 << 20)
    for text in ("aaaa" * 100, "bbbb" * 100):
        rendered = Rendered([Colliding(text)])
        assert namer.name(PLAIN, NAMINGS[0], rendered) == naive(NAMINGS[0], Rendered([text]))
    assert namer.counters.nodes == 3


def conversation(number: int, length: int = 3) -> Rendered:
    return Rendered([f"{number}:{turn}:" + "x" * 300 for turn in range(length)])


def test_one_off_tails_leave_before_what_was_met_again() -> None:
    namer = PromptNamer(400_000)
    shared = "s" * 3000
    for number in range(2):
        namer.name(PLAIN, NAMINGS[0], Rendered([shared, f"{number}" + LONG]))
    for number in range(2000):
        namer.name(PLAIN, NAMINGS[0], conversation(number))
    assert namer.counters.evicted > 2000
    assert namer.counters.bytes <= 400_000
    hits = namer.counters.hits
    namer.name(PLAIN, NAMINGS[0], Rendered([shared, "new" + LONG]))
    assert namer.counters.hits == hits + 1


def test_a_branch_nobody_came_back_to_leaves_as_a_whole() -> None:
    namer = PromptNamer(19_300)
    for number in range(3):
        namer.name(PLAIN, NAMINGS[0], conversation(number))
    assert namer.counters.evicted == 3
    missing = [len(namer.look_up(PLAIN, NAMINGS[0], conversation(number)).missing) for number in range(3)]
    assert missing == [3, 0, 0]


def test_what_was_met_again_leaves_room_for_the_new() -> None:
    namer = PromptNamer(400_000)
    for number in range(300):
        for _ in range(2):
            namer.name(PLAIN, NAMINGS[0], conversation(number))
    assert namer._kept_bytes > namer._kept_bytes_max
    for number in range(1000, 1020):
        namer.name(PLAIN, NAMINGS[0], conversation(number))
    hits = namer.counters.hits
    namer.name(PLAIN, NAMINGS[0], conversation(1019, 4))
    assert namer.counters.hits == hits + 3


def test_a_prompt_larger_than_the_cache() -> None:
    namer = PromptNamer(10_000)
    rendered = Rendered(["y" * 50_000, LONG])
    for _ in range(2):
        assert namer.name(PLAIN, NAMINGS[1], rendered) == naive(NAMINGS[1], rendered)
    assert namer.counters.nodes == 1, "the root is left"
    assert namer.counters.bytes <= 10_000


def test_refused_text_leaves_no_trace() -> None:
    class Refusing(PlainRenderer):
        fingerprint = "refusing"

        def encode(self, segment: str) -> "array[int]":
            raise PromptError("no")

    namer = PromptNamer(1 << 20)
    with pytest.raises(PromptError):
        namer.name(Refusing(), NAMINGS[0], Rendered([LONG]))
    assert namer.counters.nodes == 0


class TestTokenIds:
    def named(self, naming: Naming, token_ids: Sequence[int]) -> NamedPrompt:
        return NamedPrompt(len(token_ids), naming.hasher.chain(naming.root, pack_tokens(token_ids)))

    @pytest.mark.parametrize("count", [0, 3, 4, 2047, 2048, 2049, 20_001])
    @pytest.mark.parametrize("naming", NAMINGS[:2])
    def test_names_are_those_of_the_tokens(self, naming: Naming, count: int) -> None:
        token_ids = [random.Random(count).randrange(2**32) for _ in range(count)]
        namer = PromptNamer(1 << 22)
        for prompt in (token_ids, array("I", token_ids), tuple(token_ids)):
            assert namer.name_tokens(naming, prompt) == self.named(naming, token_ids)

    def test_a_longer_prompt_continues_a_known_one(self) -> None:
        namer = PromptNamer(1 << 22)
        token_ids = list(range(10_000))
        namer.name_tokens(NAMINGS[1], token_ids[:8_192])
        hits = namer.counters.hits
        assert namer.name_tokens(NAMINGS[1], token_ids) == self.named(NAMINGS[1], token_ids)
        assert namer.counters.hits == hits + 4

    def test_text_and_token_ids_have_the_same_names(self) -> None:
        namer = PromptNamer(1 << 20)
        text = "Hello, world. " * 50
        by_text = namer.name(PLAIN, NAMINGS[0], PLAIN.text(text))
        assert namer.name_tokens(NAMINGS[0], PLAIN.encode(text)) == by_text

    @pytest.mark.parametrize("bad", [[-1], [2**32]])
    def test_ids_out_of_range(self, bad: list[int]) -> None:
        with pytest.raises(OverflowError):
            PromptNamer(1 << 20).name_tokens(NAMINGS[0], bad)


def test_no_cache_is_shared_between_namings() -> None:
    """How long naming takes says nothing of what was named under another key."""
    namer, rendered = PromptNamer(1 << 20), Rendered(["short"], True)
    first, second = NAMINGS[:2]
    namer.name(PLAIN, first, rendered)
    assert namer.look_up(PLAIN, first, rendered).last_tokens is not None
    assert namer.look_up(PLAIN, second, rendered).last_tokens is None
