"""Locust users for an OpenAI server, of the kinds that its caches meet. Needs `pip install ropeway[loadtest]`.

    locust -f loadtest/locustfile.py --headless -u 20 -r 5 -t 1m -H http://127.0.0.1:8000
    locust -f loadtest/locustfile.py --class-picker          choose among users in the browser

Besides locust's own entry for each request there are two more: `TTFT` (first token with content in it) and `ITL` (mean
time between tokens of the answer). What is not answered whole, an error within the stream too, is a failure.
ROPEWAY_MODEL names the model; without it the first that the server lists is asked for. ROPEWAY_API_KEY is sent as
bearer token.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any

import gevent
import orjson
from locust import HttpUser, between, constant, task

from loadtest.client.answers import Answer, StreamObserver, error_text, read_document
from loadtest.traces.prose import prose

CHARACTERS_PER_TOKEN = 4
SYSTEM_PROMPTS = 8
DOCUMENTS = 40
BURST_SIBLINGS = 8
CONVERSATION_TURNS = 12

Message = dict[str, Any]
_numbers = count()


def message(role: str, key: object, tokens: int) -> Message:
    """A message of about so many tokens; equal keys read equal."""
    return {"role": role, "content": prose(key, tokens * CHARACTERS_PER_TOKEN)}


class OpenAIUser(HttpUser):
    """Asks an OpenAI server, and reports what such a server is judged by."""

    abstract = True
    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        self.number = next(_numbers)
        self.rng = Random(f"user {self.number}")
        key = os.environ.get("ROPEWAY_API_KEY", "")
        self.client.trust_env = False
        self.client.headers.update({"authorization": f"Bearer {key}"} if key else {})
        self.model = os.environ.get("ROPEWAY_MODEL") or self._listed_model()

    def _listed_model(self) -> str:
        with self.client.get("/v1/models", catch_response=True) as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                response.failure("no model is listed")
                return ""

    def chat(self, name: str, messages: list[Message], output_tokens: int = 64, streaming: bool = True) -> None:
        self.ask(name, "/v1/chat/completions", {"messages": messages, "max_tokens": output_tokens}, streaming)

    def ask(self, name: str, path: str, body: dict[str, Any], streaming: bool = True) -> None:
        """Send a request; its entry in locust ends with its answer's last byte."""
        body = {**body, "model": self.model, "stream": streaming}
        if streaming:
            body["stream_options"] = {"include_usage": True}
        with (
            self._answered(name) as answer,
            self.client.post(
                path,
                data=orjson.dumps(body),
                headers={"content-type": "application/json"},
                name=name,
                stream=True,
                catch_response=True,
            ) as response,
        ):
            answer.status = response.status_code
            if response.status_code != 200:
                answer.failure = f"status {response.status_code}: {error_text(_document(response.content))}"
            elif streaming:
                observer = StreamObserver(answer)
                for piece in response.iter_content(None):
                    observer.received(piece, time.perf_counter())
                observer.ended()
            else:
                read_document(answer, response.content, time.perf_counter())
            if answer.failure:
                response.failure(answer.failure)
            else:
                # Locust's own time is to the head; users wait for the end.
                response.request_meta["response_time"] = (time.perf_counter() - answer.sent_at) * 1e3
                response.success()

    @contextmanager
    def _answered(self, name: str) -> Iterator[Answer]:
        began = time.perf_counter()
        answer = Answer(0, due_at=began, sent_at=began)
        yield answer
        if answer.failure or answer.ttft_seconds is None:
            return
        times = answer.token_times
        self._report("TTFT", name, answer.ttft_seconds * 1e3)
        if len(times) > 1:
            self._report("ITL", name, (times[-1] - times[0]) / (len(times) - 1) * 1e3)

    def _report(self, kind: str, name: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=0, exception=None, context={}
        )


class ChatUser(OpenAIUser):
    """Short questions behind one of a few system prompts; answers in one piece."""

    @task
    def question(self) -> None:
        system = message("system", ("chat", self.rng.randrange(SYSTEM_PROMPTS)), 400)
        question = message("user", self.rng.random(), 60)
        self.chat("chat", [system, question], streaming=False)


class CompletionUser(OpenAIUser):
    """Bare prompts, each of its own."""

    @task
    def complete(self) -> None:
        prompt = prose(self.rng.random(), 200 * CHARACTERS_PER_TOKEN)
        self.ask("completion", "/v1/completions", {"prompt": prompt, "max_tokens": 32})


class StreamingUser(OpenAIUser):
    """Longer answers, read as they come."""

    @task
    def stream(self) -> None:
        system = message("system", ("stream", self.rng.randrange(SYSTEM_PROMPTS)), 400)
        self.chat("stream", [system, message("user", self.rng.random(), 100)], output_tokens=128)


class ConversationUser(OpenAIUser):
    """Conversations whose history grows with each turn; after the last a new one begins."""

    history: list[Message]

    def on_start(self) -> None:
        super().on_start()
        self.history = []

    @task
    def turn(self) -> None:
        if not self.history or len(self.history) > 2 * CONVERSATION_TURNS:
            self.history = [message("system", ("agent", self.rng.randrange(SYSTEM_PROMPTS)), 800)]
        self.history.append(message("user", self.rng.random(), 80))
        self.chat("conversation", self.history)
        self.history.append(message("assistant", self.rng.random(), 64))


class RagUser(OpenAIUser):
    """Questions about some documents of a common store, the popular ones oftener, in any order."""

    @task
    def ask_documents(self) -> None:
        drawn = {min(int(self.rng.expovariate(0.1)), DOCUMENTS - 1) for _ in range(4)}
        order = self.rng.sample(sorted(drawn), len(drawn))
        documents = [prose(("document", number), 300 * CHARACTERS_PER_TOKEN) for number in order]
        content = "\n\n".join([*documents, prose(self.rng.random(), 40 * CHARACTERS_PER_TOKEN)])
        self.chat("rag", [message("system", "rag", 100), {"role": "user", "content": content}])


class BurstUser(OpenAIUser):
    """Siblings of one new long prompt, all at once, as an agent asks who samples several answers."""

    wait_time = constant(10.0)

    @task
    def burst(self) -> None:
        beginning = message("system", self.rng.random(), 1_000)
        questions = [message("user", (self.number, self.rng.random()), 30) for _ in range(BURST_SIBLINGS)]
        siblings = [gevent.spawn(self.chat, "burst", [beginning, question]) for question in questions]
        gevent.joinall(siblings)


def _document(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
