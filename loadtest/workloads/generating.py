"""The workloads there are, and `generate`."""

from collections.abc import Callable, Iterator, Mapping
from random import Random

from loadtest.traces.building import Draft, assembled
from loadtest.traces.contract import Trace
from loadtest.traces.pieces import PromptTree
from loadtest.workloads.agents import Agents
from loadtest.workloads.batch import Batch
from loadtest.workloads.chat import Chat
from loadtest.workloads.contract import Setting, Workload
from loadtest.workloads.fanout import FanOut
from loadtest.workloads.rag import Rag
from loadtest.workloads.swe import MultiAgentSwe
from loadtest.workloads.tenants import Tenants
from loadtest.workloads.text import CHARACTERS_PER_TOKEN
from loadtest.workloads.tools import AgentTools

BLOCK_SIZE_TOKENS = 512
GENERATED = "generated"
_K = 1024
_PROGRESS_STEP = 256

_ALL = (
    Workload(
        "multi-agent-swe", "teams of coding agents: a lead, siblings on one issue, growing tool loops",
        MultiAgentSwe(), 0.35, "issues", requests=8_000,
    ),
    Workload(
        "rag", "questions about popular documents, five passages a prompt in any order",
        Rag(), 12.0, "readers", requests=8_000,
    ),
    Workload("chat", "people in conversations with twenty applications", Chat(), 6.0, "conversations", requests=8_000),
    Workload("batch", "500 items at once under one set of instructions", Batch(), 0.03, "batches"),
    Workload(
        "agent-tools", "assistants with fourteen tools, calls and results in closed loops",
        AgentTools(), 4.0, "conversations", requests=8_000,
    ),
    Workload(
        "tenants", "150 tenants with system prompts of 6k tokens, Zipf",
        Tenants(150, 6 * _K, question_tokens=1_100), 34.0, requests=3_000,
    ),
    Workload(
        "tenants-long", "30 tenants with 24k tokens each, Zipf, caches of 600 blocks",
        Tenants(30, 24 * _K, question_tokens=500), 28.0, requests=3_000, cache_tokens=600 * 512,
    ),
    Workload(
        "tenants-flat", "60 tenants with 12k tokens each, Zipf 0.8, caches of 500 blocks",
        Tenants(60, 12 * _K, 0.8, question_tokens=800), 20.0, requests=3_000, cache_tokens=500 * 512,
    ),
    Workload(
        "tenants-cold", "100 tenants beside prompts of 10k tokens that come once, caches of 600 blocks",
        Tenants(100, 6 * _K, question_tokens=1_100, cold_share=0.2, cold_tokens=10 * _K), 25.0,
        requests=3_000, cache_tokens=600 * 512,
    ),
    Workload("fan-out", "8 siblings of a new prompt of 16k tokens, 5 ms apart", FanOut(8, 16 * _K), 1.1, "groups"),
    Workload(
        "fan-out-small", "4 siblings of a new prompt of 8k tokens, 5 ms apart",
        FanOut(4, 8 * _K, question_tokens=1_000), 4.0, "groups", workers=16,
    ),
    Workload(
        "burst", "64 siblings of a new prompt of 4k tokens, all at once",
        FanOut(64, 4 * _K, gap_seconds=0.0, question_tokens=200), 0.1, "groups", requests=640,
    ),
    Workload(
        "agents", "agents of 40 types, 12 turns, growing by an answer and 1.1k tokens each",
        Agents(40), 5.0, "conversations", requests=12_000,
    ),
    Workload(
        "agents-many", "agents of 200 types, caches of 1,800 blocks",
        Agents(200), 10.0, "conversations", requests=16_000, workers=16, cache_tokens=1800 * 512,
    ),
)  # fmt: skip

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}


def generate(
    name: str,
    seed: int = 0,
    *,
    requests: int | None = None,
    rate: float | None = None,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
    bodies: bool = False,
    characters_per_token: float = CHARACTERS_PER_TOKEN,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """A workload's requests, the same for the same arguments. Raises KeyError for an unknown name, ValueError.

    `rate` in the workload's unit (`Workload.unit`) a second. With `bodies` each request has the chat completion body
    that it stands for; its text has `characters_per_token` characters for each token of the trace.
    """
    workload = WORKLOADS[name]
    count = workload.requests if requests is None else requests
    speed = workload.rate if rate is None else rate
    if count < 1 or not speed > 0.0:
        raise ValueError(f"a workload needs at least one request and a rate above 0, not {count} and {speed}")
    setting = Setting(
        Random(f"{name}:{seed}"), PromptTree(block_size_tokens), speed, count, bodies, characters_per_token
    )
    drafts = list(_counted(workload.generator(setting), count, progress))
    note = f"generated: {workload.summary}; {speed:g} {workload.unit} a second, seed {seed}"
    return Trace(name, GENERATED, block_size_tokens, assembled(drafts), (note,))


def _counted(drafts: Iterator[Draft], count: int, progress: Callable[[int, int], None] | None) -> Iterator[Draft]:
    for done, draft in zip(range(1, count + 1), drafts, strict=False):
        if progress is not None and (done % _PROGRESS_STEP == 0 or done == count):
            progress(done, count)
        yield draft
