"""Which plans of a request a vLLM worker carries out. What comes in a request may be anything; nothing is raised.

Runs of the prompt's own chain, at their own position, from another worker; and where there is a fuser, runs that say
what the prompt says elsewhere. Nothing that is worse than what the request's salt says, since all that is under one
salt is shared.
"""

import logging
from collections.abc import Sequence

from cachecore.holders import Pool
from cachecore.scope import Fidelity
from cachecore.transfer.errors import PlanError, Reason, TransferError
from cachecore.transfer.plan import PARAMETER, PLANS_MAX, Pull
from workers.transfer.plans import PlanReader, fraction_in, is_part_of, is_said_by
from workers.vllm.names import RequestNames
from workers.vllm.reports import key_of
from workers.vllm.requests import EngineRequest, Planned

logger = logging.getLogger("ropeway.transfer")


class PlanDesk:
    """Reads the plans of requests."""

    def __init__(self, reader: PlanReader, fuses: bool = False) -> None:
        """`fuses`: there is a fuser."""
        self._reader = reader
        self._fuses = fuses

    def __call__(self, request: EngineRequest, names: RequestNames, accepted: Fidelity) -> Planned:
        pulls: list[Pull] = []
        passages: list[Pull] = []
        refused = []
        params = request.kv_transfer_params
        for document in _documents(params):
            try:
                pull = self._reader.checked(document, names.naming.scope.key_id, accepted)
                (pulls if self._is_own(pull, names, accepted) else passages).append(pull)
            except TransferError as error:
                logger.info("a plan is not carried out (%s): %s", error.reason, error)
                refused.append(error.reason)
        pulls.sort(key=lambda pull: pull.plan.run.first_block)
        passages.sort(key=lambda pull: pull.plan.target_position)
        return Planned(pulls, passages, fraction_in(params) if passages else None, refused, key_of(params))

    def _is_own(self, pull: Pull, names: RequestNames, accepted: Fidelity) -> bool:
        """Whether the run is of the prompt's own chain, or else one that says what the prompt says where it is wanted.
        Raises PlanError for any other."""
        if isinstance(pull.plan.source, Pool):
            raise PlanError("a plan to pull from a pool, and none is open here", Reason.UNREACHABLE)
        if is_part_of(pull, names):
            if pull.plan.source == self._reader.holder:
                raise PlanError("a plan to pull from oneself", Reason.OTHER_SOURCE)
            return True
        if not self._fuses or not is_said_by(pull, names):
            raise PlanError("a plan for another prompt, or another position", Reason.UNEXPECTED)
        if min(accepted, pull.capability.fidelity) < Fidelity.FUSED:
            raise PlanError("a run of another position; the request accepts no such KV", Reason.UNEXPECTED)
        return False


def _documents(params: object) -> Sequence[object]:
    given = params.get(PARAMETER) if isinstance(params, dict) else None
    return given[:PLANS_MAX] if isinstance(given, list) else []
