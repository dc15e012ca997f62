"""Every header of Ropeway's own, and the few others that it reads or sets: what each says, and on which way.

The reference page is made from this table, and a test holds it against the code: a header that is not here is a mistake
there.
"""

from enum import StrEnum
from typing import NamedTuple


class Way(StrEnum):
    """On which it travels."""

    ASKED = "client to gateway"
    ANSWERED = "gateway to client"
    SENT = "gateway to worker"
    TOLD = "worker to gateway"


class Header(NamedTuple):
    name: str
    ways: tuple[Way, ...]
    meaning: str


HEADERS = (
    Header(
        "x-ropeway-worker",
        (Way.ANSWERED,),
        "Name of the worker that answered. Absent where none did, as with refusals.",
    ),
    Header(
        "x-ropeway-matched-tokens",
        (Way.ANSWERED,),
        "Leading prompt tokens that the worker's own events confirmed as cached when the request was placed.",
    ),
    Header(
        "x-ropeway-policy",
        (Way.ASKED, Way.ANSWERED),
        "Asked: the policy for this request, where `policy_header_allowed`. Answered: the one that decided.",
    ),
    Header(
        "x-ropeway-session",
        (Way.ASKED,),
        "Key of a conversation or user, at most 256 characters, for policies and pins that keep it in place; else the "
        "body's `user`.",
    ),
    Header(
        "x-ropeway-namespace",
        (Way.ASKED,),
        "`tenant` (by default) or `public`: whether the prompt's KV is shared with all tenants, if the key allows it.",
    ),
    Header(
        "x-ropeway-fidelity",
        (Way.ASKED, Way.ANSWERED, Way.SENT, Way.TOLD),
        "`exact`, `quantized`, `rotated` or `fused`. Asked and sent: the worst KV that the request accepts. Otherwise: "
        "the worst that it was answered from.",
    ),
    Header(
        "x-ropeway-ttft-budget-ms",
        (Way.ASKED,),
        "What the first token may take, from arrival on, in whole milliseconds; what cannot be met is refused.",
    ),
    Header(
        "x-ropeway-timeout-ms",
        (Way.ASKED,),
        "What the whole request may take, in whole milliseconds, at most `timeouts.total_seconds`.",
    ),
    Header(
        "x-ropeway-trust",
        (Way.ANSWERED,),
        "`history` or `load`: how far the worker's events were believed. Absent where they were wholly.",
    ),
    Header(
        "x-ropeway-queued-ms", (Way.ANSWERED,), "How long the request waited at the gateway. Absent where it did not."
    ),
    Header(
        "x-ropeway-legs",
        (Way.ANSWERED,),
        "`outcome=...; worker=...; seconds=...`: what became of the prefill elsewhere, in fleets with workers of role "
        "`prefill`.",
    ),
    Header("x-ropeway-hedge", (Way.ANSWERED,), "Of a second worker's answer: the worker that was asked first."),
    Header(
        "x-ropeway-transfer",
        (Way.ANSWERED, Way.TOLD),
        "What became of a plan to pull KV: its outcome, tokens, bytes and seconds.",
    ),
    Header(
        "x-request-id",
        (Way.ASKED, Way.ANSWERED, Way.SENT),
        "The client's own id of 1 to 128 letters, digits and `._:-`, or one of ours. Workers get one that no other "
        "live request has.",
    ),
    Header("request-id", (Way.ANSWERED,), "The same id, under the name that Anthropic's clients read."),
    Header("x-api-key", (Way.ASKED,), "An API key, as Anthropic's clients send it."),
    Header("retry-after", (Way.ANSWERED,), "With 429 and 503: whole seconds after which it is worth another try."),
    Header("www-authenticate", (Way.ANSWERED,), "With 401: `Bearer`."),
    Header("authorization", (Way.ASKED,), "`Bearer KEY`: an API key, or an operator's key at operators' routes."),
)
