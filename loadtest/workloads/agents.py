"""Agents in closed loops: each turn adds the answer and what a tool said to a growing prompt, after a pause."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import Zipf, around, geometric


@dataclass(frozen=True, slots=True)
class Agents:
    types: int
    """How many different system prompts there are; which one an agent has is Zipf."""
    system_tokens: int = 4_096
    task_tokens: int = 500
    turns: float = 12.0
    answer_tokens: int = 300
    result_tokens: int = 1_100
    pause_seconds_min: float = 0.3
    pause_seconds: float = 6.0
    """Mean of what comes on top of the least pause."""

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        popularity = Zipf(self.types)
        for number, arrival in enumerate(poisson(setting.rng, setting.rate)):
            yield from self._conversation(setting, number, popularity.draw(setting.rng), arrival)

    def _conversation(self, setting: Setting, number: int, kind: int, arrival: float) -> Iterator[Draft]:
        rng = setting.rng
        system = setting.tree.root.then(Piece(("agent", kind), self.system_tokens, "system"))
        prompt = system.alone(Piece(("task", number), around(rng, self.task_tokens)))
        answer = around(rng, self.answer_tokens)
        draft = setting.request(prompt, arrival, answer, session=f"agent-{number}", tenant=f"type-{kind}")
        yield draft
        for turn in range(1, geometric(rng, self.turns)):
            said = prompt.alone(Piece(("answer", number, turn), answer, "assistant"))
            prompt = said.alone(Piece(("result", number, turn), around(rng, self.result_tokens), "tool"))
            answer = around(rng, self.answer_tokens)
            pause = self.pause_seconds_min + rng.expovariate(1.0 / self.pause_seconds)
            draft = setting.after(draft, prompt, pause, answer)
            yield draft
