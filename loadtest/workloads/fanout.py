"""Groups of siblings: one long prompt nobody has seen, asked several things within milliseconds."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import around


@dataclass(frozen=True, slots=True)
class FanOut:
    siblings: int
    prompt_tokens: int
    gap_seconds: float = 0.005
    question_tokens: int = 500
    output_tokens: int = 300

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        rng = setting.rng
        for group, arrival in enumerate(poisson(rng, setting.rate)):
            shared = setting.tree.root.alone(Piece(("group", group), self.prompt_tokens, "system"))
            for sibling in range(self.siblings):
                question = Piece(("sibling", group, sibling), around(rng, self.question_tokens, 0.25))
                prompt = shared.alone(question)
                output = around(rng, self.output_tokens)
                yield setting.request(prompt, arrival + sibling * self.gap_seconds, output, tenant=f"group-{group}")
