"""Teams of coding agents: a lead reads an issue, sends out workers of several roles, and reads what they report.

All begin with the house's tools and rules; those on one issue go on with the same view of the repository, then with
their role. Workers start within milliseconds of one another, so that they are siblings of one new prompt; each then
loops over tools, its prompt growing with the files it opens. The lead goes on when the worker with most to do is done.
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
class MultiAgentSwe:
    repositories: int = 30
    tools: int = 12
    tool_tokens: int = 150
    rules_tokens: int = 2_200
    repository_tokens: int = 5_000
    issue_tokens: int = 700
    roles: int = 4
    role_tokens: int = 400
    workers: int = 4
    """Most that a lead sends out at a time."""
    rounds: float = 2.0
    steps: float = 8.0
    """Mean of a worker's."""
    call_tokens: int = 110
    file_tokens: int = 1_300
    report_tokens: int = 350
    tool_seconds: float = 1.5
    spread_seconds: float = 0.02
    """Within which a round's workers start."""

    def __call__(self, setting: Setting) -> Iterator[Draft]:
        popularity = Zipf(self.repositories)
        for number, arrival in enumerate(poisson(setting.rng, setting.rate)):
            yield from self._issue(setting, number, popularity.draw(setting.rng), arrival)

    def _opening(self, setting: Setting, repository: int) -> Beginning:
        prompt = setting.tree.root
        for tool in range(self.tools):
            prompt = prompt.then(Piece(("tool", tool), self.tool_tokens, TOOLS))
        prompt = prompt.then(Piece("rules", self.rules_tokens, "system"))
        return prompt.then(Piece(("repository", repository), self.repository_tokens))

    def _issue(self, setting: Setting, number: int, repository: int, arrival: float) -> Iterator[Draft]:
        rng = setting.rng
        view = self._opening(setting, repository).then(Piece(("issue", number), around(rng, self.issue_tokens)))
        lead = view.alone(Piece(("plan", number), self.role_tokens))
        output = around(rng, self.report_tokens)
        tenant = f"repository-{repository}"
        last = setting.request(lead, arrival, output, session=f"lead-{number}", tenant=tenant)
        yield last
        for turn in range(geometric(rng, self.rounds)):
            lead = lead.alone(Piece(("order", number, turn), output, "assistant"))
            loops = [self._worker(setting, number, turn, one, view, last) for one in range(self._team(setting))]
            for loop in loops:
                yield from loop
            longest = max(loops, key=lambda loop: loop[-1].arrival_seconds)[-1]
            reports = sum(loop[-1].output_tokens for loop in loops)
            lead = lead.alone(Piece(("reports", number, turn), reports))
            output = around(rng, self.report_tokens)
            last = setting.after(longest, lead, 0.0, output)
            last.session = f"lead-{number}"
            yield last

    def _team(self, setting: Setting) -> int:
        return setting.rng.randint(2, self.workers)

    def _worker(self, setting: Setting, number: int, turn: int, one: int, view: Beginning, lead: Draft) -> list[Draft]:
        """A worker's requests, the last of which is its report."""
        rng, key = setting.rng, (number, turn, one)
        prompt = view.then(Piece(("role", one % self.roles), self.role_tokens))
        prompt = prompt.alone(Piece(("order", *key), around(rng, self.call_tokens)))
        steps = geometric(rng, self.steps)
        drafts: list[Draft] = []
        for step in range(steps):
            output = around(rng, self.report_tokens if step == steps - 1 else self.call_tokens)
            pause = rng.expovariate(1.0 / self.tool_seconds) if drafts else rng.uniform(0.0, self.spread_seconds)
            draft = setting.after(drafts[-1] if drafts else lead, prompt, pause, output)
            draft.session = f"worker-{number}-{turn}-{one}"
            drafts.append(draft)
            prompt = prompt.alone(Piece(("call", *key, step), output, "assistant"))
            prompt = prompt.alone(Piece(("file", *key, step), around(rng, self.file_tokens, 0.8), "tool"))
        return drafts
