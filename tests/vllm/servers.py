"""Real vLLM instances on loopback, started as docs/vllm.md says, from an environment that has vLLM."""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from tests.gateway.end_to_end.processes import HOST, Process, eventually, free_ports

MODEL = "smollm2"
TOPIC = "kv-events"
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 2048
STALL_SECONDS = 2.0
"""After which a source that sends nothing is given up: tests look around while one is silent."""

Events = Literal["connect", "bind", "off"]
"""Which side of the live socket the engine is; an endpoint without a wildcard makes it connect."""

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
    """`vllm serve` of SmolLM2 in float32, with events, detailed usage and the token routes; and with the connector that
    moves KV, where there is a keyring.

    The constructor returns at once, so that several can load at a time. Started by its module, since the `vllm` command
    asks for metadata that the package for CPUs does not bring.
    """

    module = "vllm.entrypoints.openai.api_server"
    ends_by = signal.SIGINT
    start_seconds_max = 600.0
    stop_seconds_max = 30.0

    def __init__(
        self,
        directory: Path,
        model: Path,
        name: str,
        *flags: str,
        events: Events = "connect",
        blocks: int = 96,
        keyring: Path | None = None,
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
        self._directory = directory
        self._name = name
        self._arguments = [*self._serving(model), *self._publishing(events), *self._moving(ports[3:]), *flags]
        self._environment = {**_ENVIRONMENT, **(environment or {})}
        self.http = httpx.Client(base_url=self.url, timeout=300, trust_env=False)
        self.start()

    def _serving(self, model: Path) -> list[str]:
        return [
            *("--model", str(model), "--served-model-name", MODEL, "--host", HOST, "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS)),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.blocks)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"),
        ]

    def _publishing(self, events: Events) -> Sequence[str]:
        if events == "off":
            return ()
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": TOPIC,
        }
        return "--kv-events-config", json.dumps(config)

    def _moving(self, ports: Sequence[int]) -> Sequence[str]:
        if self.keyring is None:
            return ()
        config = {
            "kv_connector": "RopewayConnector",
            "kv_connector_module_path": "workers.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "keyring": str(self.keyring),
                "port": ports[0],
                "sidecar_port": ports[1],
                "stall_seconds": STALL_SECONDS,
            },
        }
        return "--kv-transfer-config", json.dumps(config)

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
