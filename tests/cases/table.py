"""Every fault that operators of such systems have reported, by its kind, and the tests that hold it here.

The numbers are those of the list that the project was started with. A kind is more than the one report of it: its tests
put other instances of it to the proof as well. `docs/cases.md` is this table as a page (`python -m tests.cases.page`).
"""

from collections.abc import Mapping

from tests.cases import asking, deciding, knowing
from tests.cases.case import Case

SECTIONS = {
    1: "Request bodies",
    22: "Event streams",
    37: "Clients that leave, deadlines, connections",
    47: "HTTP",
    58: "Keys, ids and headers",
    62: "From prompts to blocks",
    79: "KV events",
    97: "Lives of workers",
    106: "Decisions",
    122: "Memory",
    127: "The shared index",
    136: "KV that moves",
    142: "Audit and load tests",
}
"""By the number that each begins with."""

CASES: Mapping[int, Case] = {**asking.CASES, **knowing.CASES, **deciding.CASES}
