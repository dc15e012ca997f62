"""What serves the messages that are not inference, on connections that the edge keeps."""

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class InnerProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, told to report each complete answer and to leave keep-alive to the edge."""

    answer_sent: Callable[[], None]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self.answer_sent()
