"""TLS before a server that speaks none: what stands in front of many an engine."""

import asyncio
import ssl
import threading
from contextlib import suppress
from typing import Self

from cachecore.transfer.tcp.tls import TlsFiles
from tests.gateway.end_to_end.processes import HOST


class TlsRelay:
    """Passes bytes on, in a thread with a loop of its own."""

    def __init__(self, files: TlsFiles, target_port: int) -> None:
        self.handshakes = 0
        self._target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.certificate, files.key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._relay, HOST, 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handshakes += 1
        inner_reader, inner_writer = await asyncio.open_connection(HOST, self._target_port)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    finally:
        target.close()
