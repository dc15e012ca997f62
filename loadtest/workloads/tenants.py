"""Many tenants, each with a long system prompt of its own: who asks is Zipf, what they ask is new each time."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import Zipf, around


@dataclass(frozen=True, slots=True)
class Tenants:
    count: int
    prompt_tokens: int
    exponent: float = 1.0
    question_tokens: int = 600
    output_tokens: int = 250
    cold_share: float = 0.0
    """Of the requests, those with a prompt that nobody else has."""
    cold_tokens: int = 0

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        rng, root = setting.rng, setting.tree.root
        popularity = Zipf(self.count, self.exponent)
        for number, arrival in enumerate(poisson(rng, setting.rate)):
            output = around(rng, self.output_tokens)
            if rng.random() < self.cold_share:
                prompt = root.alone(Piece(("cold", number), around(rng, self.cold_tokens, 0.1)))
                yield setting.request(prompt, arrival, output, tenant="cold")
                continue
            tenant = popularity.draw(rng)
            system = root.then(Piece(("tenant", tenant), self.prompt_tokens, "system"))
            prompt = system.alone(Piece(("question", number), around(rng, self.question_tokens)))
            yield setting.request(prompt, arrival, output, tenant=f"tenant-{tenant}")
