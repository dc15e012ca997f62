"""The OpenAPI document: what the edge serves is in it, and every operation tells how it refuses."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from gateway.api.errors import MESSAGES_PATHS
from gateway.views.openapi import describe


def document(public: bool = True) -> dict[str, Any]:
    app = FastAPI(title="T", version="1")

    @app.get("/v1/models")
    async def models(limit: int = 5) -> dict[str, int]:
        return {}

    @app.post("/route/explain")
    async def explain() -> dict[str, int]:
        return {}

    describe(app, public)
    assert app.openapi() is app.openapi()
    return app.openapi()


def operations(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in schema["paths"].values():
        yield from path.values()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_routes_of_the_edge_are_described_where_it_is() -> None:
    inference = {"/v1/chat/completions", "/v1/completions"}
    assert inference <= document()["paths"].keys()
    assert inference.isdisjoint(document(public=False)["paths"])
    post = document()["paths"]["/v1/chat/completions"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert post["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_every_operation_tells_how_it_refuses() -> None:
    anthropics = [document()["paths"][path]["post"] for path in sorted(MESSAGES_PATHS)]
    for operation in operations(document()):
        assert "422" not in operation["responses"]
        form = "AnthropicError" if operation in anthropics else "Error"
        for status in ("400", "401", "404", "429", "502", "503", "504"):
            content = operation["responses"][status]["content"]["application/json"]
            assert content["schema"]["$ref"] == f"#/components/schemas/{form}"


def test_bodies_that_the_application_reads_by_itself_are_described() -> None:
    body = document()["paths"]["/route/explain"]["post"]["requestBody"]
    assert len(body["content"]["application/json"]["schema"]["oneOf"]) == 2


def test_every_reference_leads_somewhere() -> None:
    schema = document()
    named = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert {*references(schema["paths"])} <= named
    assert {*references(schema["components"])} <= named
