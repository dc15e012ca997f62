"""Two vLLM instances that move KV, asked as a gateway would ask them, with plans as it would sign them."""

import json
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.index.schema import parse_holder
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, TenantId
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from tests.vllm.servers import BLOCK_TOKENS, MODEL, VllmServer
from tests.workers.contract.lab import cached_tokens, data_of
from workers.openai.fidelity import TRANSFER_HEADER

TENANT, RIVAL = KeyId(DEFAULT_TENANT, 0), KeyId(TenantId("rival"), 0)
BYTES_PER_TOKEN = 46_080
"""Of SmolLM2's KV in float32."""


class Answer(NamedTuple):
    tokens: Sequence[int]
    cached_tokens: int
    ttft_seconds: float
    report: str = ""
    """What it says became of the request's plans."""


class Movers:
    """What is asked of two instances with one keyring."""

    def __init__(self, source: VllmServer, target: VllmServer, keyring: Keyring) -> None:
        self.source, self.target = source, target
        self.keyring = keyring
        self._random = random.Random(time.time())  # also among runs on one long-lived instance

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that begin like those of no other prompt."""
        return self._random.choices(range(1000, 40_000), k=tokens)

    def bytes_of(self, tokens: int) -> int:
        """Of their KV, as the source keeps it."""
        return int(tokens * info(self.source)["transfer"]["bytes_per_token"])

    def salt(self, key_id: KeyId = TENANT, fidelity: Fidelity = Fidelity.EXACT) -> str:
        return self.keyring.mint_salt(Salt(key_id, fidelity))

    def naming(self) -> Naming:
        """Of the tenant's blocks."""
        tokenizer = info(self.source)["tokenizer_fingerprint"]
        return Naming.of(IdentityScope(MODEL, TENANT, BLOCK_TOKENS, tokenizer=tokenizer), self.keyring)

    def plan(self, prompt: Sequence[int], **changes: Any) -> Plan:
        """That the target pulls whole blocks of a prompt from the source, from `first` to `end`, or all."""
        about, naming = info(self.source), self.naming()
        chain = naming.hasher.chain(naming.root, pack_tokens(prompt))
        first, end = changes.pop("first", 0), changes.pop("end", len(prompt) // BLOCK_TOKENS)
        parent = chain[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else naming.root
        run = Run(PrefixHash(parent), PrefixHash(chain[(end - 1) * HASH_BYTES : end * HASH_BYTES]), first, end - first)
        holder, addresses = parse_holder(about["transfer"]["holder"].encode()), about["transfer"]["addresses"]
        position = first * BLOCK_TOKENS
        return Plan(holder, tuple(addresses), run, position, position, "raw", 30.0)._replace(**changes)

    def signed(
        self,
        plan: Plan,
        keyring: Keyring | None = None,
        target: VllmServer | None = None,
        fidelity: Fidelity = Fidelity.EXACT,
    ) -> Mapping[str, Any]:
        holder = parse_holder(info(target or self.target)["transfer"]["holder"].encode())
        return sign(plan, Grant(TENANT, holder, fidelity, time.time() + 600), keyring or self.keyring)

    def body(self, prompt: Sequence[int], *documents: object, output_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        params = {"kv_transfer_params": {PARAMETER: list(documents)}} if documents else {}
        return {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": self.salt(),
            **params,
            **fields,
        }

    def cold(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """The source computes a prompt, and has it then."""
        return ask(self.source.http, self.body(prompt, **fields))

    def pull(self, prompt: Sequence[int], *plans: Plan, **fields: Any) -> Answer:
        """The target answers a prompt whose plans say where to pull it from."""
        return ask(self.target.http, self.body(prompt, *map(self.signed, plans), **fields))

    def outcomes(self) -> dict[str, int]:
        """Of the target's pulls so far."""
        return dict(info(self.target)["counts"]["pulls"])


def ask(http: httpx.Client, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """A streamed completion, to its end."""
    began, first, tokens, usage = time.perf_counter(), 0.0, [], {}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        report = answer.headers.get(TRANSFER_HEADER, "")
        for line in answer.iter_lines():
            for event in data_of([line]):
                chunk = json.loads(event) if event != "[DONE]" else {"choices": []}
                usage = chunk.get("usage") or usage
                tokens += [token for choice in chunk["choices"] for token in choice["token_ids"] or ()]
                first = first or (time.perf_counter() - began if tokens else 0.0)
    return Answer(tokens, cached_tokens(usage), first, report)


def ask_whole(http: httpx.Client, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """The same, answered in one piece."""
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    began = time.perf_counter()
    answer = http.post("/v1/completions", json=plain, headers=headers).raise_for_status()
    document, report = answer.json(), answer.headers.get(TRANSFER_HEADER, "")
    tokens = document["choices"][0]["token_ids"]
    return Answer(tokens, cached_tokens(document["usage"]), time.perf_counter() - began, report)


@contextmanager
def asked_in_vain(http: httpx.Client, body: Mapping[str, Any]) -> Iterator[None]:
    """A request whose client leaves when the block ends, whatever has come; not even a head need have."""
    host, port, sent = http.base_url.host, http.base_url.port, json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        yield


def info(server: VllmServer) -> dict[str, Any]:
    """What the connector says of itself."""
    return httpx.get(f"{server.sidecar}/server_info", trust_env=False).raise_for_status().json()  # type: ignore[no-any-return]
