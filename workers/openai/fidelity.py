"""How good the KV may be that a request is answered from, how good it was, and how it came: by headers."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request

from cachecore.scope import Fidelity
from workers.engine import TransferOutcome
from workers.openai.choices import Choice
from workers.openai.errors import InvalidRequest

FIDELITY_HEADER = "x-ropeway-fidelity"
TRANSFER_HEADER = "x-ropeway-transfer"

_BY_NAME = {fidelity.name.lower(): fidelity for fidelity in Fidelity}


def accepted_fidelity(request: Request) -> Fidelity:
    """The worst that the request accepts; nothing but exact KV where it does not say. Raises InvalidRequest."""
    name = request.headers.get(FIDELITY_HEADER, "exact")
    if name not in _BY_NAME:
        raise InvalidRequest(f"{FIDELITY_HEADER} is one of {', '.join(_BY_NAME)}", param=FIDELITY_HEADER)
    return _BY_NAME[name]


def kv_headers(choices: Sequence[Choice]) -> Mapping[str, str]:
    """What an answer says of the KV that it came from. Known once every choice has had its first output."""
    headers = {FIDELITY_HEADER: max(choice.fidelity for choice in choices).name.lower()}
    reports = [choice.transfer for choice in choices if choice.transfer is not None]
    # Of several choices of one prompt, the first to run fetches and the others find it there.
    reports.sort(key=lambda report: report.outcome is TransferOutcome.HELD)
    return {**headers, TRANSFER_HEADER: reports[0].header()} if reports else headers
