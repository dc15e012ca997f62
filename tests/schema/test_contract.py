"""A real gateway and a simulated worker, asked whatever our OpenAPI document allows, and what it does not.

schemathesis makes the requests and judges the answers: by status, type, schema and headers, and whether what is wrong
is refused and what is right is not. `make test-schema`, in an environment of its own.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "60"))
OPERATIONS = [
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/metrics"),
    ("get", "/status"),
    ("get", "/admin/workers"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/route/explain"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
]
"""Not those that register or remove: workers made up here would be called."""


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("schema")
    keyring = str(new_keyring(directory))
    with (
        Fleet(directory, "--speed", "1000", "--keyring", keyring, count=1) as fleet,
        Gateway(directory, fleet.urls, {"keyring": keyring}) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def document(gateway: Gateway) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_keep_to_the_document(document: Any, method: str, path: str, mode: Any) -> None:
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def judge(case: Any) -> None:
        case.call_and_validate(timeout=30)

    try:
        judge()
    except Unsatisfiable:
        # There is nothing about it that could be wrong.
        assert mode is schemathesis.GenerationMode.NEGATIVE
