"""One line a request, in the log of a gateway that was told to."""

import json
from pathlib import Path

from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, eventually


def test_every_request_leaves_one_line_and_no_prompt(tmp_path: Path) -> None:
    config = {"logs": {"format": "json", "requests": "all"}}
    with Fleet(tmp_path, "--speed", "50", count=1) as fleet, Gateway(tmp_path, fleet.urls, config) as gateway:
        headers = {"authorization": "Bearer hush", "x-request-id": "mine-1"}
        assert gateway.post(chat("whisper", stream=True), headers).status_code == 200
        assert gateway.post({**chat("whisper"), "model": "hidden"}, headers).status_code == 404
        assert gateway.http.get("/healthz").status_code == 200
        eventually(lambda: "model_not_found" in gateway.said(), "the lines are written")
        said = gateway.said()
    assert not any(word in said for word in ("whisper", "hush", "hidden"))
    lines = [json.loads(line) for line in said.splitlines()]
    requests = [line for line in lines if line["logger"] == "ropeway.requests"]
    (complete,) = [line for line in requests if line.get("request_id") == "mine-1"]
    assert (complete["ending"], complete["status"], complete["worker"]) == ("complete", 200, fleet.names[0])
    assert complete["ttft_ms"] > 0
    (refused,) = [line for line in requests if line.get("code") == "model_not_found"]
    assert (refused["level"], refused["status"], refused["path"]) == ("warning", 404, "/v1/chat/completions")
    assert any(line["logger"] == "ropeway.fleet" and "is ready" in line["message"] for line in lines)
