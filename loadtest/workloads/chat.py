"""People who chat: a few applications' system prompts, short questions, longer answers, a while to read them."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import Zipf, around, geometric


@dataclass(frozen=True, slots=True)
class Chat:
    applications: int = 20
    system_tokens: int = 600
    turns: float = 5.0
    question_tokens: int = 90
    pasted_share: float = 0.1
    """Of the questions, those that come with a pasted text."""
    pasted_tokens: int = 1_500
    answer_tokens: int = 280
    pause_seconds: float = 20.0

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        popularity = Zipf(self.applications)
        for number, arrival in enumerate(poisson(setting.rng, setting.rate)):
            yield from self._conversation(setting, number, popularity.draw(setting.rng), arrival)

    def _conversation(self, setting: Setting, number: int, application: int, arrival: float) -> Iterator[Draft]:
        rng = setting.rng
        # Two applications differ in length too, as theirs do.
        length = self.system_tokens * (1 + application % 4) // 2
        prompt = setting.tree.root.then(Piece(("application", application), length, "system"))
        session, tenant = f"chat-{number}", f"application-{application}"
        previous: Draft | None = None
        for turn in range(geometric(rng, self.turns)):
            prompt = prompt.alone(Piece(("question", number, turn), self._question(setting)))
            answer = around(rng, self.answer_tokens, 0.8)
            if previous is None:
                previous = setting.request(prompt, arrival, answer, session=session, tenant=tenant)
            else:
                pause = 1.0 + rng.expovariate(1.0 / self.pause_seconds)
                previous = setting.after(previous, prompt, pause, answer)
            yield previous
            prompt = prompt.alone(Piece(("answer", number, turn), answer, "assistant"))

    def _question(self, setting: Setting) -> int:
        rng = setting.rng
        pasted = around(rng, self.pasted_tokens) if rng.random() < self.pasted_share else 0
        return around(rng, self.question_tokens, 0.8) + pasted
