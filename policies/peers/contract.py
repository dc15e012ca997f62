"""What a rival's router keeps besides what the gateway knows of its workers.

Some routers count what they have dispatched in units of their own (Dynamo its active blocks, Preble the work of the
last minutes). Such a policy is an `Observer`: whoever runs it, in the audit or as a shadow, tells it what really
happened, whoever decided it.
"""

from random import Random
from typing import NamedTuple, Protocol, TypeGuard

from policies.contract import Decision, Policy, Query, Snapshot, WorkerView


class Asked(NamedTuple):
    """What such a policy may look at besides the `Query`."""

    chain: bytes
    """Names of the prompt's blocks (`policies.state.chains`)."""
    prompt_tokens: int
    block_size_tokens: int


class Observer(Protocol):
    """A policy with accounts of its own. Requests that it has not heard of are ignored."""

    name: str

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision: ...

    def asked(self, asked: Asked) -> None:
        """Comes right before `decide`, and is about the same request."""
        ...

    def dispatched(self, request_id: str, asked: Asked, view: WorkerView, now: float) -> None:
        """The request has been given to this worker; its view still says what it had of the prompt."""
        ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def finished(self, request_id: str, now: float) -> None:
        """However it ended, and whether or not it had a first token."""
        ...


def observes(policy: Policy) -> TypeGuard[Observer]:
    """Whether a policy is to be told of requests."""
    return hasattr(policy, "dispatched")
