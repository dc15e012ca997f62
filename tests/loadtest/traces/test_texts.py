"""Formats that hold text: conversations in closed loops, bodies, logs, spans; and who counts their tokens."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from cachecore.blocks import split_chain
from loadtest.audit.ceilings import Ceilings
from loadtest.traces.contract import Trace, TraceError
from loadtest.traces.reading import read_trace
from loadtest.traces.texts import QuadRenderer, load_renderer


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "rules " * 40}


def common(trace: Trace, one: int, other: int) -> int:
    """How many blocks two prompts begin with alike."""
    pairs = zip(split_chain(trace.requests[one].chain), split_chain(trace.requests[other].chain), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_four_bytes_are_a_token_without_a_tokenizer() -> None:
    renderer = QuadRenderer()
    assert len(renderer.encode("twelve bytes")) == 3
    assert len(renderer.encode("thirteen bytes")) == 4
    assert renderer.decode(renderer.encode("thirteen bytes")) == "thirteen bytes"
    assert renderer.encode("abcdefgh")[0] == renderer.encode("abcdxxxx")[0]


def test_sharegpt_turns_are_a_closed_loop(tmp_path: Path) -> None:
    turns = [("human", "Who are you? " * 20), ("gpt", "I am a model."), ("human", "Since when?"), ("gpt", "Today.")]
    rows = [{"id": "identity_0", "conversations": [{"from": who, "value": text} for who, text in turns]}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=2))
    trace = read_trace(path, think_seconds=2.5)
    first, second = trace.requests
    assert trace.format == "sharegpt"
    assert (second.follows, second.delay_seconds, second.session) == (0, 2.5, "identity_0")
    assert second.arrival_seconds == first.arrival_seconds + 2.5
    assert (first.output_tokens, second.output_tokens) == (4, 2)
    assert first.blocks > 3
    assert common(trace, 0, 1) == first.blocks
    assert second.body is not None
    assert [message["role"] for message in second.body["messages"]] == ["user", "assistant", "user"]


def test_a_conversation_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    good = {"id": "g", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    bad = {"id": "b", "conversations": [*good["conversations"], {"from": "alien", "value": "?"}]}
    silent = {"id": "s", "conversations": [{"from": "gpt", "value": "y"}]}
    trace = read_trace(written(tmp_path / "a.jsonl", good, bad, good, silent, good))
    assert len(trace.requests) == 3
    [note] = [note for note in trace.notes if "malformed" in note]
    assert "row 2: nobody is called 'alien'" in note
    assert "row 4: a conversation in which no user speaks" in note


def test_questions_get_stand_ins_for_answers(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}
    trace = read_trace(written(tmp_path / "a.jsonl", row), output_tokens=50)
    assert trace.format == "fastchat-questions"
    first, second = trace.requests
    assert second.input_tokens - first.input_tokens == pytest.approx(50, abs=12)
    assert (first.output_tokens, second.follows) == (50, 0)


def test_batches_arrive_at_once(tmp_path: Path) -> None:
    bodies = [
        {"model": "m", "messages": [SYSTEM, user("one")], "max_tokens": 7},
        {"model": "m", "messages": [SYSTEM, user("two")], "max_completion_tokens": 1000},
    ]
    rows = [
        {"custom_id": str(place), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for place, body in enumerate(bodies)
    ]
    embedding = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    trace = read_trace(written(tmp_path / "a.jsonl", *rows, embedding))
    assert trace.format == "openai-batch"
    assert [(r.arrival_seconds, r.output_tokens) for r in trace.requests] == [(0.0, 7), (0.0, 128)]
    assert [r.body for r in trace.requests] == bodies
    assert common(trace, 0, 1) == 4
    assert any("line 3: no `messages` and no `prompt`; it is for /v1/embeddings" in note for note in trace.notes)


def test_logs_say_when_what_was_asked_and_answered(tmp_path: Path) -> None:
    usage = {"usage": {"completion_tokens": 33}}
    chosen = {"choices": [{"message": assistant("eight by")}]}
    rows = [
        {"timestamp": "2026-01-01T00:00:05Z", "request": {"messages": [user("a")]}, "response": usage, "user_id": "u"},
        {"timestamp": "2026-01-01T00:00:02Z", "request": {"messages": [user("b")]}, "response": {"body": chosen}},
        {"timestamp": "2026-01-01T00:00:04Z", "request": {"model": "m", "input": "c", "instructions": "be brief"}},
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    assert trace.format == "request-log"
    assert [r.arrival_seconds for r in trace.requests] == [0.0, 2.0, 3.0]
    assert [r.output_tokens for r in trace.requests] == [2, 128, 33]
    assert trace.requests[2].session == "u"
    converted = trace.requests[1].body
    assert converted is not None
    assert converted["messages"] == [{"role": "system", "content": "be brief"}, user("c")]


def test_a_log_of_bare_bodies(tmp_path: Path) -> None:
    rows = [{"model": "m", "messages": [user("hello")], "user": "ann"}, {"model": "m", "prompt": ["x", "y"]}]
    trace = read_trace(written(tmp_path / "a.jsonl", *rows), rate=10.0, seed=2)
    assert [request.session for request in trace.requests] == ["ann", "", ""]
    assert [request.body["prompt"] for request in trace.requests[1:] if request.body] == ["x", "y"]
    assert "no times: 3 requests or conversations begin at 10 a second (Poisson, seed 2)" in trace.notes


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, True),
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
        ({"prompt_logprobs": None}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True, "logprobs": 0}, False),
    ],
)
def test_what_engines_compute_whole_hits_nothing(tmp_path: Path, keys: dict[str, Any], shared: bool) -> None:
    rows = [{"model": "m", "prompt": "the same words " * 40, **keys}] * 3
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    assert Ceilings(trace).infinite().blocks == (pytest.approx(2 / 3) if shared else 0.0)
    assert any(note.startswith("3 ask for their prompt's logprobs") for note in trace.notes) is not shared


def test_images_count_as_what_names_them(tmp_path: Path) -> None:
    def row(url: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what? " * 40}]}]}

    trace = read_trace(written(tmp_path / "a.jsonl", row("x"), row("x"), row("y")))
    chains = [request.chain for request in trace.requests]
    assert chains[0] == chains[1] != chains[2]
    assert any(note.startswith("3 prompts hold more than text") for note in trace.notes)


def test_broken_bodies_are_named(tmp_path: Path) -> None:
    rows = [{"messages": [user("a")]}, {"messages": [{"content": "nobody"}]}, {"messages": [user("b")]}]
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    assert any("row 2: `messages[0]` must be an object with a `role`" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("row", "name", "output"),
    [
        ({"prompt": "Hello, how are you?", "output_tokens_count": 5}, "guidellm", 5),
        ({"prompt": "Hello", "output_tokens": 10}, "vllm-custom", 10),
        ({"prompt": "Hello"}, "vllm-custom", 128),
        ({"prompt": "Where", "prompt_length": 3, "output_length": 22, "session_id": "0"}, "aibrix", 22),
        ({"prompt_hash": "x=", "n_gen_tokens": 3, "gen_tokens": {}, "input_text": "1, 2"}, "llm-d-inference-sim", 3),
        ({"timestamp": 5, "text_input": "Hello world", "output_length": 4}, "aiperf-texts", 4),
        ({"text": "hello", "timestamp": 0}, "aiperf-texts", 128),
        ({"texts": ["hello", "world"], "images": ["x.png"]}, "aiperf-texts", 128),
        ({"session_id": "s", "messages": [user("x")], "output_length": 9, "delay": None}, "aiperf-texts", 9),
    ],
)
def test_prompts_of_benchmarks(tmp_path: Path, row: dict[str, Any], name: str, output: int) -> None:
    trace = read_trace(written(tmp_path / "a.jsonl", row))
    assert (trace.format, [request.output_tokens for request in trace.requests]) == (name, [output])


def test_aibrix_workloads_are_milliseconds(tmp_path: Path) -> None:
    def row(time: int, *prompts: str) -> dict[str, Any]:
        requests = [{"Prompt Length": 3, "Output Length": 22, "prompt": prompt} for prompt in prompts]
        return {"timestamp": time, "requests": requests}

    trace = read_trace(written(tmp_path / "a.jsonl", row(0, "a"), row(1500, "b", "c")))
    assert [request.arrival_seconds for request in trace.requests] == [0.0, 1.5, 1.5]


def test_aiperf_turns_and_payloads(tmp_path: Path) -> None:
    turns = [{"text": "hello " * 20, "delay": 0}, {"text": "more", "delay": 1500}]
    trace = read_trace(written(tmp_path / "a.jsonl", {"session_id": "s", "turns": turns}))
    assert [(r.follows, r.delay_seconds) for r in trace.requests] == [(-1, 0.0), (0, 1.5)]
    payloads = [{"messages": [user("a")], "max_completion_tokens": 57}, {"messages": [user("a"), user("b")]}]
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps({"data": [{"session_id": "s", "payloads": payloads}]}, indent=1))
    trace = read_trace(path)
    assert (trace.format, [r.follows for r in trace.requests]) == ("aiperf-inputs", [-1, 0])
    assert trace.requests[0].output_tokens == 57


def test_trajectories_wait_for_their_tools(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "create", "arguments": '{"name": "x"}'}}
    history = [
        {**SYSTEM, "agent": "main"},
        {**user("solve it"), "agent": "main"},
        {**assistant("I create."), "tool_calls": [call], "thought": "hm"},
        {"role": "tool", "content": "done", "tool_call_ids": ["c"]},
        assistant("finished"),
    ]
    path = tmp_path / "x.traj"
    path.write_text(json.dumps({"trajectory": [{"execution_time": 4.0}], "history": history}, indent=2))
    trace = read_trace(path)
    assert (trace.format, len(trace.requests)) == ("swe-agent", 2)
    assert trace.requests[1].delay_seconds == 4.0
    assert trace.requests[1].body is not None
    assert trace.requests[1].body["messages"][3] == {"role": "tool", "content": "done", "tool_call_id": "c"}
    assert "agent" not in trace.requests[1].body["messages"][0]


def test_tau_bench_in_both_forms(tmp_path: Path) -> None:
    traj = [SYSTEM, user("hi"), assistant("hello"), user("bye"), assistant("bye")]
    trace = read_trace(written(tmp_path / "a.jsonl", {"task_id": 3, "trial": 1, "traj": traj}))
    assert [(r.session, r.follows) for r in trace.requests] == [("task-3-1", -1), ("task-3-1", 0)]
    display = "user: Hi\nthere\nassistant: None\ntool: 42\nassistant: done"
    trace = read_trace(written(tmp_path / "a.jsonl", {"messages_display": display}))
    assert trace.format == "tau-bench"
    assert trace.requests[1].body == {
        "messages": [user("Hi\nthere"), assistant("None"), {"role": "tool", "content": "42"}]
    }


def test_bfcl_reads_tools_beside_it(tmp_path: Path) -> None:
    question = [[user("move it")], [user("and back")]]
    row = {"id": "m_0", "question": question, "involved_classes": ["MathAPI", "Nowhere"], "excluded_function": ["sub"]}
    (tmp_path / "multi_turn_func_doc").mkdir()
    tools = [{"name": name, "description": "d", "parameters": {"type": "dict"}} for name in ("add", "sub")]
    written(tmp_path / "multi_turn_func_doc" / "math_api.json", *tools)
    trace = read_trace(written(tmp_path / "a.json", row))
    assert (trace.format, [r.follows for r in trace.requests]) == ("bfcl", [-1, 0])
    assert trace.requests[0].body is not None
    assert [tool["function"]["name"] for tool in trace.requests[0].body["tools"]] == ["add"]
    assert any("the tools of Nowhere are described in no file" in note for note in trace.notes)


def span(start: float, end: float, messages: list[dict[str, str]], trace: str = "t") -> dict[str, Any]:
    return {
        "trace_id": trace,
        "start_time": f"2026-02-25T10:00:{start:09.6f}",
        "end_time": f"2026-02-25T10:00:{end:09.6f}",
        "attributes": {"gen_ai.input.messages": json.dumps(messages), "gen_ai.output.text": "answer to it"},
    }


def test_spans_wait_for_the_one_that_ended_last(tmp_path: Path) -> None:
    spans = [
        span(0, 2, [user("a")]),
        span(3, 5, [user("a"), assistant("x"), user("b")]),
        span(3.5, 9, [user("c")]),
        span(10, 11, [user("d")]),
        span(4, 5, [user("e")], trace="other"),
        {"trace_id": "t", "start_time": 0, "attributes": {"http.method": "GET"}},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"trace_id": "t", "spans": spans}, indent=2))
    trace = read_trace(path)
    assert trace.format == "otel"
    asked = {request.body["messages"][-1]["content"]: request for request in trace.requests if request.body}
    order = [request.body["messages"][-1]["content"] for request in trace.requests if request.body]
    assert {key: (order[r.follows] if r.follows >= 0 else None, r.delay_seconds) for key, r in asked.items()} == {
        "a": (None, 0.0),
        "b": ("a", 1.0),
        "c": ("a", 1.5),
        "d": ("c", 1.0),
        "e": (None, 0.0),
    }
    assert {request.output_tokens for request in trace.requests} == {3}
    assert "1 spans are no requests" in trace.notes


def test_an_otlp_export(tmp_path: Path) -> None:
    parts = [{"role": "user", "parts": [{"type": "text", "content": "hello there"}]}]
    attributes = {"gen_ai.input.messages": json.dumps(parts), "gen_ai.usage.output_tokens": "12"}
    one = {
        "traceId": "t",
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000001000000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
    }
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}
    trace = read_trace(written(tmp_path / "a.json", document))
    assert [(r.output_tokens, r.body) for r in trace.requests] == [(12, {"messages": [user("hello there")]})]
    with pytest.raises(TraceError, match="none of its 1 spans holds messages; read as otel"):
        read_trace(written(tmp_path / "a.json", {"spans": [{"attributes": {}}]}))


def test_sonnets_share_their_first_lines(tmp_path: Path) -> None:
    path = tmp_path / "sonnet.txt"
    path.write_text("\n".join(f"Line {place} of a poem about a summer's day" for place in range(60)))
    trace = read_trace(path)
    assert (trace.format, len(trace.requests)) == ("sonnet", 1_000)
    mean = sum(request.input_tokens for request in trace.requests) / 1_000
    assert mean == pytest.approx(550, rel=0.03)
    assert common(trace, 0, 1) == pytest.approx(200 / 16, abs=2)


def test_a_tokenizer_that_is_handed_in_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "you": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = load_renderer(tmp_path / "tokenizer.json")
    trace = read_trace(written(tmp_path / "a.jsonl", {"prompt": "hello you hello you"}), renderer=renderer)
    assert trace.requests[0].input_tokens == 4
    assert any("counted by the tokenizer handed in (tokenizer)" in note for note in trace.notes)
    with pytest.raises(TraceError, match="nowhere: there is no such file"):
        load_renderer(tmp_path / "nowhere")
