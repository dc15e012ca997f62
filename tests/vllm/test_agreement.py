"""What the gateway says a worker has of a prompt, beside what the worker then reports."""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.gateway.end_to_end.processes import Gateway, eventually, matched_tokens
from tests.vllm.conftest import PLAIN, Pair, Report
from tests.vllm.mix import TURNS, Ask, Conversation, Words, about_a_document, repeated, salted, token_ids
from tests.vllm.servers import BLOCK_TOKENS, MODEL

pytestmark = [pytest.mark.vllm, PLAIN]

logger = logging.getLogger(__name__)

REQUESTS = 60


class Outcome(NamedTuple):
    """A request, in tokens of its prompt."""

    label: str
    worker: str
    began: float
    ended: float
    prompt: int
    confirmed: int
    """As the worker's events said at the moment of decision; it is in the answer's head as well."""
    matched: int
    """With what was on its way there."""
    evidence: str
    reported: int

    @property
    def difference(self) -> int:
        """Above 0 where more was promised than was there."""
        return self.matched - self.reported

    def overlaps(self, other: "Outcome") -> bool:
        return self is not other and self.began < other.ended and other.began < self.ended


class Client:
    """Sends requests through a gateway and keeps what became of them."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.outcomes: list[Outcome] = []

    def ask(self, *asks: Ask) -> list[str]:
        """One after the other; the texts of the answers."""
        return [self._outcome(ask, *self._send(ask)) for ask in asks]

    def ask_together(self, asks: Sequence[Ask]) -> None:
        with ThreadPoolExecutor(len(asks)) as threads:
            sent = list(threads.map(self._send, asks))
        for ask, answered in zip(asks, sent, strict=True):
            self._outcome(ask, *answered)

    def _send(self, ask: Ask) -> tuple[httpx.Response, float, float]:
        began = time.time()
        answer = self.gateway.post(dict(ask.body), path=ask.path)
        assert answer.status_code == 200, answer.text
        return answer, began, time.time()

    def _outcome(self, ask: Ask, answer: httpx.Response, began: float, ended: float) -> str:
        request_id = answer.headers["x-request-id"]
        # Newest first, and one for each worker that was tried.
        receipt = next(r for r in self.gateway.status()["receipts"] if r["request_id"] == request_id)
        assert receipt["reported_prompt_tokens"] == receipt["prompt_tokens"]
        assert receipt["confirmed_tokens"] == matched_tokens(answer)
        said = [receipt[key] for key in ("prompt_tokens", "confirmed_tokens", "matched_tokens", "evidence")]
        reported = receipt["reported_cached_tokens"]
        self.outcomes.append(Outcome(ask.label, receipt["worker"], began, ended, *said, reported))
        logger.info("%s", self.outcomes[-1])
        if ask.body.get("stream") or "messages" not in ask.body:
            return ""
        return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def gateway(pair: Pair, model: Path, tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path, [server.url for server in pair], {"tokenizers": {MODEL: str(model)}})
    gateway.http.timeout = 300
    with gateway:
        yield gateway


def test_sixty_requests_find_what_was_promised(gateway: Gateway, pair: Pair, report: Report) -> None:
    client = Client(gateway)
    run_mix(client, pair)
    outcomes = client.outcomes
    assert len(outcomes) == REQUESTS
    apart = [outcome for outcome in outcomes if abs(outcome.difference) > BLOCK_TOKENS]
    over = [outcome for outcome in outcomes if outcome.difference > 0]
    explained = {outcome: explain(outcome, outcomes) for outcome in outcomes if outcome.difference}
    report(summary(outcomes, apart, over))
    for outcome, why in explained.items():
        report(f"  {outcome.label}: {outcome.matched} matched ({outcome.evidence}), {outcome.reported} cached: {why}")
    assert len(apart) <= 0.05 * REQUESTS
    assert len(over) <= 0.01 * REQUESTS
    assert all(explained.values()), [outcome for outcome, why in explained.items() if not why]
    # A mix that reuses nothing would agree as well.
    assert sum(outcome.reported for outcome in outcomes) > 0.4 * sum(outcome.prompt for outcome in outcomes)
    assert {outcome.worker for outcome in outcomes} == {server.worker for server in pair}
    assert all(worker["parity"] == "proven" for worker in gateway.status()["workers"])


def run_mix(client: Client, pair: Pair) -> None:
    words = Words(seed=1)
    documents = [words.some(150) for _ in range(3)]
    conversations = [Conversation(number, words) for number in range(5)]
    for turn in range(TURNS):
        for conversation in conversations:
            conversation.answered(*client.ask(conversation.ask()))
        if turn == 1:
            client.ask_together(about_a_document(documents[0], words))
        if turn == 2:
            pair.b.stop()
            pair.b.start()
        if turn == 3:
            client.ask_together(about_a_document(documents[1], words))
            pair.b.wait_ready()
            eventually(lambda: client.gateway.healthy() == 2, "both are back", 60.0)
        if turn == 4:
            client.ask_together(about_a_document(documents[0], words))
    client.ask_together(about_a_document(documents[2], words))
    client.ask(*repeated(words), *token_ids(words), *salted(words))


def explain(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Why an answer's hit is not what was said; empty when nothing known makes it so."""
    beside = [other for other in outcomes if other.worker == outcome.worker and other.overlaps(outcome)]
    sharing = [other for other in beside if other.label == outcome.label]
    if outcome.difference < 0 and sharing:
        return "its beginning was computed for a neighbour after it was placed"
    if outcome.difference > 0 and outcome.evidence == "predicted" and sharing:
        return "its neighbour, from which it was to come, was not computed before it"
    return ""


def summary(outcomes: Sequence[Outcome], apart: Sequence[Outcome], over: Sequence[Outcome]) -> str:
    prompt, matched, reported = (
        sum(getattr(outcome, field) for outcome in outcomes) for field in ("prompt", "matched", "reported")
    )
    return (
        f"{len(outcomes)} requests, {prompt} prompt tokens: {matched} matched, {reported} reported as cached; "
        f"{len(apart)} differ by more than a block, {len(over)} were promised more than there was"
    )
