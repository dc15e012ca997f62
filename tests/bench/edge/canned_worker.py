"""A canned OpenAI worker for measuring what stands in front of it: raw protocol, fixed answers, next to no work.

usage: canned_worker.py PORT [CHUNKS]

`POST .../completions` is answered with one JSON body, or with CHUNKS events where the body asks for a stream.
An answer reports as many prompt tokens as `PUT /prompt_tokens` last said (none before), so that a gateway that
compares counts finds them right. `GET /v1/models` lists the model `m`; any other GET is 200; any other POST is 404.
"""

import asyncio
import re
import sys

import uvloop

CHUNKS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"bench","max_model_len":131072}]}'
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def completion(prompt_tokens: int | None) -> bytes:
    usage = b"null"
    if prompt_tokens is not None:
        usage = b'{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d}' % (prompt_tokens, prompt_tokens + 1)
    return answer(
        b"200 OK",
        b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":%b}' % usage,
    )


class Canned:
    completion = completion(None)


EVENT_CHUNK = chunk(EVENT)
STREAM_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
NOT_FOUND = answer(b"404 Not Found", b"{}")
EMPTY = answer(b"200 OK", b"{}")


class Worker(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            match = CONTENT_LENGTH.search(head)
            size = end + 4 + (int(match[1]) if match else 0)
            if len(self.buffer) < size:
                return
            body, self.buffer = self.buffer[end + 4 : size], self.buffer[size:]
            self.respond(head.split(b"\r\n", 1)[0], body)

    def respond(self, line: bytes, body: bytes) -> None:
        if line.startswith(b"post") and b"completions" in line:
            if b'"stream":true' in body.replace(b" ", b""):
                asyncio.get_running_loop().create_task(self.stream())
            else:
                self.transport.write(Canned.completion)
        elif line.startswith(b"put /prompt_tokens"):
            Canned.completion = completion(int(body) if body != b"null" else None)
            self.transport.write(EMPTY)
        elif line.startswith(b"post"):
            self.transport.write(NOT_FOUND)
        else:
            self.transport.write(answer(b"200 OK", MODELS) if b"/v1/models" in line else EMPTY)

    async def stream(self) -> None:
        self.transport.write(STREAM_HEAD)
        for _ in range(CHUNKS):
            if self.transport.is_closing():
                return
            self.transport.write(EVENT_CHUNK)
            await asyncio.sleep(0)
        self.transport.write(STREAM_END)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
