"""A scheduler's requests without vLLM, and plans for their prompts."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.holders import Epoch, Holder, Worker, WorkerName
from cachecore.scope import DEFAULT_TENANT, Fidelity, KeyId, Naming, Salt, TenantId
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from tests.workers.reference.support import KEYRING, BytesRenderer
from workers.engine import TransferMetrics
from workers.transfer.plans import PlanReader
from workers.vllm.names import Namings
from workers.vllm.plans import PlanDesk
from workers.vllm.requests import Requests

SIZE = 4
TENANT, RIVAL = KeyId(DEFAULT_TENANT, 0), KeyId(TenantId("rival"), 0)
SALT = KEYRING.mint_salt(Salt(TENANT))
OURS = Worker(WorkerName("ours:1"), Epoch(7))
THEIRS = Worker(WorkerName("theirs:1"), Epoch(3))
NAMINGS = Namings(KEYRING, "tiny", BytesRenderer.fingerprint, SIZE)

_rng = random.Random(3)
PROMPT = [_rng.randrange(97) for _ in range(42)]
"""10 blocks and two tokens."""


@dataclass
class FakeRequest:
    """As much of a `vllm.v1.request.Request` as is looked at."""

    request_id: str = "one"
    all_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    cache_salt: str | None = SALT
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)


def naming_of(salt: str | None = SALT) -> Naming:
    lineage = NAMINGS.of(salt)
    assert lineage is not None
    return lineage.naming


def chain_of(prompt: Sequence[int] = PROMPT, salt: str | None = SALT) -> list[PrefixHash]:
    naming = naming_of(salt)
    chain = naming.hasher.chain(naming.root, pack_tokens(prompt))
    return [PrefixHash(chain[at : at + HASH_BYTES]) for at in range(0, len(chain), HASH_BYTES)]


def run_of(first: int, end: int, prompt: Sequence[int] = PROMPT, salt: str | None = SALT) -> Run:
    names = chain_of(prompt, salt)
    return Run(names[first - 1] if first else naming_of(salt).root, names[end - 1], first, end - first)


def plan_of(first: int = 0, end: int = 10, *, prompt: Sequence[int] = PROMPT, **changes: Any) -> Plan:
    run = run_of(first, end, prompt)
    return Plan(THEIRS, ("tcp://127.0.0.1:9",), run, first * SIZE, first * SIZE, "raw", 5.0)._replace(**changes)


def signed(plan: Plan, *, target: Holder = OURS, key_id: KeyId = TENANT, seconds: float = 3600.0) -> dict[str, Any]:
    return sign(plan, Grant(key_id, target, Fidelity.QUANTIZED, time.time() + seconds), KEYRING)


def params(*documents: object) -> Mapping[str, Any]:
    return {PARAMETER: list(documents)}


def planned(request_id: str = "one", *plans: Plan, **fields: Any) -> FakeRequest:
    """A request with plans for its prompt; one for all of it where none are given."""
    documents = [signed(plan) for plan in plans or (plan_of(),)]
    return FakeRequest(request_id, kv_transfer_params=params(*documents), **fields)


def desk(codecs: Sequence[str] = ("raw", "i8")) -> PlanDesk:
    return PlanDesk(PlanReader(KEYRING, OURS, codecs, TransferMetrics()))


def scheduler() -> Requests:
    return Requests(NAMINGS.of, desk(), SIZE)
