"""Assistants with tools: schemas and rules that a product's users share, a task, calls and what they return.

Between two calls of a model lies only how long a tool takes; between two wishes of a user, how long a person does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Beginning, Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import Zipf, around, geometric
from loadtest.workloads.text import TOOLS


@dataclass(frozen=True, slots=True)
class AgentTools:
    products: int = 12
    tools: int = 14
    tool_tokens: int = 180
    rules_tokens: int = 1_400
    wishes: float = 3.0
    calls: float = 2.5
    """Mean of calls to the model for a wish, the last of which answers the user."""
    wish_tokens: int = 60
    call_tokens: int = 45
    result_tokens: int = 350
    answer_tokens: int = 120
    tool_seconds: float = 0.8
    pause_seconds: float = 12.0

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        popularity = Zipf(self.products)
        for number, arrival in enumerate(poisson(setting.rng, setting.rate)):
            yield from self._conversation(setting, number, popularity.draw(setting.rng), arrival)

    def _opening(self, setting: Setting, product: int) -> Beginning:
        prompt = setting.tree.root
        for tool in range(self.tools):
            prompt = prompt.then(Piece(("tool", product, tool), self.tool_tokens, TOOLS))
        return prompt.then(Piece(("rules", product), self.rules_tokens, "system"))

    def _conversation(self, setting: Setting, number: int, product: int, arrival: float) -> Iterator[Draft]:
        rng, prompt = setting.rng, self._opening(setting, product)
        previous: Draft | None = None
        for wish in range(geometric(rng, self.wishes)):
            prompt = prompt.alone(Piece(("wish", number, wish), around(rng, self.wish_tokens)))
            calls = geometric(rng, self.calls)
            for call in range(calls):
                output = around(rng, self.answer_tokens if call == calls - 1 else self.call_tokens)
                if previous is None:
                    session, tenant = f"assistant-{number}", f"product-{product}"
                    previous = setting.request(prompt, arrival, output, session=session, tenant=tenant)
                else:
                    mean = self.tool_seconds if call else self.pause_seconds
                    previous = setting.after(previous, prompt, rng.expovariate(1.0 / mean), output)
                yield previous
                prompt = prompt.alone(Piece(("output", number, wish, call), output, "assistant"))
                if call < calls - 1:
                    result = Piece(("result", number, wish, call), around(rng, self.result_tokens, 0.9), "tool")
                    prompt = prompt.alone(result)
