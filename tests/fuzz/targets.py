"""All targets, by name."""

from collections.abc import Mapping

from tests.fuzz import bodies, documents, events, sealed, wires
from tests.fuzz.engine import Target

TARGETS: Mapping[str, Target] = {
    target.name: target for module in (bodies, wires, events, documents, sealed) for target in module.TARGETS
}
