"""Our own workers: `/server_info` says all of it, and their metrics bear vLLM's names."""

from collections.abc import Sequence

from gateway.fleet.engines.contract import Discovery, EngineLoad, EngineTraits, ModelEntry
from gateway.fleet.engines.generic import GenericAdapter, described
from gateway.fleet.engines.questions import Questions
from gateway.fleet.engines.server_info import read_server_info
from gateway.fleet.engines.vllm import vllm_load


class RopewayAdapter(GenericAdapter):
    name = "ropeway"
    traits = EngineTraits(salts=True, priorities=True, token_ids=True, translated=True)

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        read_server_info(await ask.document("/server_info"), discovery, ask)
        return discovery

    async def load(self, ask: Questions) -> EngineLoad | None:
        return vllm_load(await ask.metrics())
