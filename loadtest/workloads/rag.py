"""Questions about documents: each prompt holds a few retrieved passages, most relevant first, then the question.

Popular documents come up again and again, but seldom in the same order, so most of what is shared does not stand at the
beginning. Questions about the same documents follow one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Beginning, Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import Zipf, around, geometric


@dataclass(frozen=True, slots=True)
class Rag:
    documents: int = 2_000
    exponent: float = 0.9
    passages: int = 5
    passage_tokens: int = 700
    system_tokens: int = 500
    question_tokens: int = 60
    questions: float = 1.6
    """Mean of a reader's about the same documents."""
    answer_tokens: int = 180
    pause_seconds: float = 15.0

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        popularity = Zipf(self.documents, self.exponent)
        for number, arrival in enumerate(poisson(setting.rng, setting.rate)):
            yield from self._reader(setting, number, self._found(setting, popularity), arrival)

    def _found(self, setting: Setting, popularity: Zipf) -> Beginning:
        """The prompt up to the question: instructions and passages."""
        prompt = setting.tree.root.then(Piece("instructions", self.system_tokens, "system"))
        found: dict[int, None] = {}
        while len(found) < self.passages:
            found[popularity.draw(setting.rng)] = None
        for document in found:
            # A document's passage has its length for good.
            tokens = self.passage_tokens // 2 + document * 37 % self.passage_tokens
            prompt = prompt.then(Piece(("document", document), tokens))
        return prompt

    def _reader(self, setting: Setting, number: int, prompt: Beginning, arrival: float) -> Iterator[Draft]:
        rng = setting.rng
        previous: Draft | None = None
        for turn in range(geometric(rng, self.questions)):
            prompt = prompt.alone(Piece(("question", number, turn), around(rng, self.question_tokens)))
            answer = around(rng, self.answer_tokens)
            if previous is None:
                previous = setting.request(prompt, arrival, answer, session=f"reader-{number}")
            else:
                pause = 1.0 + rng.expovariate(1.0 / self.pause_seconds)
                previous = setting.after(previous, prompt, pause, answer)
            yield previous
            prompt = prompt.alone(Piece(("answer", number, turn), answer, "assistant"))
