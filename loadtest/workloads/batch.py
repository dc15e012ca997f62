"""Batches: the same instructions and examples over many items, all handed in at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.pieces import Piece
from loadtest.workloads.contract import Setting
from loadtest.workloads.drawing import around


@dataclass(frozen=True, slots=True)
class Batch:
    items: int = 500
    templates: int = 8
    instruction_tokens: int = 2_500
    item_tokens: int = 1_200
    output_tokens: int = 120

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        rng = setting.rng
        for batch, arrival in enumerate(poisson(rng, setting.rate)):
            template = rng.randrange(self.templates)
            shared = setting.tree.root.then(Piece(("template", template), self.instruction_tokens, "system"))
            for item in range(self.items):
                prompt = shared.alone(Piece(("item", batch, item), around(rng, self.item_tokens, 0.7)))
                yield setting.request(prompt, arrival, around(rng, self.output_tokens), tenant=f"template-{template}")
