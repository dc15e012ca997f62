"""Real vLLM instances on loopback, started as docs/vllm.md says, from an environment that has vLLM."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from tests.gateway.end_to_end.processes import HOST, Process, eventually, free_ports
from tests.vllm.documented import flags, with_values

MODEL = "smollm2"
TOPIC = "kv-events"
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 2048
STALL_SECONDS = 5.0
"""After which a source that sends nothing is given up: tests look around while one is silent."""

Events = Literal["connect", "bind"]
"""Which side of the live socket the engine is; an endpoint without a wildcard makes it connect."""
By = Literal["module", "command"]
"""How it is started: by its module, which asks for no metadata, or by the `vllm` command, which does."""
Processes = Literal["one", "two"]
"""Of scheduler and worker."""
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer(Process):
    """`vllm serve` of SmolLM2 with the flags of docs/vllm.md; with those of the connector that moves KV, where there is
    a keyring. Besides it gets what a small machine and a test need; `connector` is more of that one's configuration.

    The constructor returns at once, so that several can load at a time.
    """

    ends_by = signal.SIGINT
    start_seconds_max = 1800.0
    stop_seconds_max = 60.0

    def __init__(
        self,
        directory: Path,
        model: Path,
        name: str,
        *more: str,
        events: Events = "connect",
        by: By = "module",
        processes: Processes = "two",
        dtype: str = "float32",
        blocks: int = 96,
        keyring: Path | None = None,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ports = free_ports(5)
        self.port = ports[0]
        self.url = f"http://{HOST}:{self.port}"
        self.worker = f"{HOST}:{self.port}"
        self.events_endpoint = f"tcp://{HOST}:{ports[1]}" if events == "connect" else f"ipc://{directory}/{name}.kv"
        self.replay_endpoint = f"tcp://{HOST}:{ports[2]}"
        self.sidecar = f"http://{HOST}:{ports[4]}"
        """Where its connector tells of itself, if it has one."""
        self.keyring = keyring
        self.blocks = blocks
        self.dtype = dtype
        self.processes = processes
        self._directory = directory
        self._name = name
        # What the documentation's `...` and MODEL stand for here.
        self.module = "tests.vllm.command" if by == "command" else "vllm.entrypoints.openai.api_server"
        what = [str(directory / "metadata"), "serve", str(model)] if by == "command" else ["--model", str(model)]
        further = (*more, *(ONE_PROCESS if processes == "one" else ()))
        self._arguments = [*what, *self._documented(ports, connector or {}), *self._here(), *further]
        self._environment = {**_ENVIRONMENT, **(environment or {})}
        self.http = httpx.Client(base_url=self.url, timeout=600, trust_env=False)
        self.start()

    def _documented(self, ports: Sequence[int], connector: Mapping[str, Any]) -> list[str]:
        changes: dict[str, dict[str, Any]] = {
            "--kv-events-config": {"endpoint": self.events_endpoint, "replay_endpoint": self.replay_endpoint}
        }
        if self.keyring is not None:
            extra = {
                "keyring": str(self.keyring),
                "port": ports[3],
                "sidecar_port": ports[4],
                "stall_seconds": STALL_SECONDS,
                **connector,
            }
            changes["--kv-transfer-config"] = {f"kv_connector_extra_config.{key}": extra[key] for key in extra}
        return with_values(flags(moves=self.keyring is not None), changes)

    def _here(self) -> list[str]:
        return [
            *("--served-model-name", MODEL, "--host", HOST, "--port", str(self.port), "--dtype", self.dtype),
            *("--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS), "--enable-prefix-caching"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.blocks)),
        ]

    def start(self) -> None:
        """Begin a life, on the same ports as any before. It ends with the thread that begins it."""
        super().__init__(self._name, self._arguments, self._directory, self._environment)

    def wait_ready(self) -> None:
        try:
            self.wait_for(lambda: self.http.get("/health").status_code == 200, "ready")
        except BaseException:
            self.stop()
            raise

    def close(self) -> None:
        self.http.close()
        self.stop()

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        return self.http.post(path, json=body)

    def sample(self, metric: str) -> float:
        """The sum over a metric's labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((metric + "{", metric + " ")))

    def wait_idle(self) -> None:
        eventually(lambda: self.sample("vllm:num_requests_running") == 0, f"{self.name} runs nothing", 60.0)
