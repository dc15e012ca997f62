"""Which plans of a request a vLLM worker carries out. What comes in a request may be anything; nothing is raised.

Only runs of the prompt's own chain, at their own position, from another worker: vLLM has no place for KV that has yet
to be repaired. And nothing that is worse than what the request's salt says, since all that is under one salt is shared.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from cachecore.holders import Pool
from cachecore.scope import Fidelity
from cachecore.transfer.errors import PlanError, Reason, TransferError
from cachecore.transfer.plan import PARAMETER, PLANS_MAX, Pull
from workers.reference.transfer.plans import PlanReader, is_part_of
from workers.vllm.names import RequestNames
from workers.vllm.requests import EngineRequest

logger = logging.getLogger("ropeway.transfer")


class PlanDesk:
    """Reads the plans of requests."""

    def __init__(self, reader: PlanReader, refused: Counter[str]) -> None:
        """`refused` counts, by reason, what is not carried out."""
        self._reader = reader
        self._refused = refused

    def __call__(self, request: EngineRequest, names: RequestNames, accepted: Fidelity) -> Sequence[Pull]:
        pulls = []
        for document in _documents(request.kv_transfer_params):
            try:
                pulls.append(self._checked(document, names, accepted))
            except TransferError as error:
                logger.info("a plan is not carried out (%s): %s", error.reason, error)
                self._refused[error.reason.value] += 1
        return pulls

    def _checked(self, document: object, names: RequestNames, accepted: Fidelity) -> Pull:
        pull = self._reader.checked(document, names.naming.scope.key_id, accepted)
        if isinstance(pull.plan.source, Pool):
            raise PlanError("a plan to pull from a pool, and none is open here", Reason.UNREACHABLE)
        if pull.plan.source == self._reader.holder:
            raise PlanError("a plan to pull from oneself", Reason.OTHER_SOURCE)
        if not is_part_of(pull, names):
            raise PlanError("a plan for another prompt, or another position", Reason.UNEXPECTED)
        return pull


def _documents(params: object) -> Sequence[object]:
    given = params.get(PARAMETER) if isinstance(params, dict) else None
    return given[:PLANS_MAX] if isinstance(given, list) else []
