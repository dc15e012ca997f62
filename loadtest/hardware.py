"""GPUs, machines, links and tiers as constants, each with its source. Decimal units: bytes, bytes a second, FLOP/s.

FLOP/s are dense (vendors' headline figures often count zeros that a pruned model would have). How much of a peak an
engine reaches is said here too, because it differs between GPUs more than data sheets do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

GIGABIT = 1e9 / 8
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    bf16_flops: float
    fp8_flops: float | None
    """None: the GPU has no such units, and computes fp8 weights as bf16."""
    memory_bytes: float
    memory_bytes_per_second: float
    source: str
    prefill_share: float = 0.5
    """Of peak FLOP/s that prefill reaches, tensor parallelism over NVLink included. Half is what the published
    figures in tests/loadtest/test_profiles.py come to on Hopper."""
    peer_bytes_per_second: float | None = None
    """Between GPUs of one machine where that is PCIe; None where it is NVLink or the like, and within the share."""

    def flops(self, precision: str) -> float:
        """Peak for weights stored as `bf16` or `fp8`."""
        return self.fp8_flops if precision == "fp8" and self.fp8_flops else self.bf16_flops


class Machine(NamedTuple):
    """A cloud's instance type: what `--gpu` may name instead of a GPU."""

    name: str
    gpu: str
    gpus: int
    network_gbps: float


class Link(NamedTuple):
    """What KV crosses between two machines."""

    name: str
    gbps: float
    share: float
    """Of the line rate that one transfer reaches."""
    latency_seconds: float
    """Before the first byte, connection setup and request included."""
    source: str

    @property
    def bytes_per_second(self) -> float:
        return self.gbps * GIGABIT * self.share


class Tier(NamedTuple):
    """Where KV lies before it moves."""

    name: str
    bytes_per_second: float
    """That it can be read with; infinite where the link is the limit."""
    latency_seconds: float
    source: str
    gpus_max: int = 1
    """Up to so many GPUs of an engine read so fast each."""
    has_local: bool = False
    """Whether a machine has one itself."""

    def rate(self, gpus: int) -> float:
        """Bytes a second for an engine of so many GPUs."""
        return self.bytes_per_second * min(gpus, self.gpus_max)


class Codec(NamedTuple):
    name: str
    compression: float
    """Bytes of bf16 KV for each byte on the way."""
    decode_bytes_per_second: float
    """Of bf16 KV that comes out; decoding goes on while the rest arrives."""


_NVIDIA = "NVIDIA's data sheet"
_PCIE_4 = 25e9
"""Of x16's 32 GB/s."""

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, None, 80e9, 2.039e12, f"{_NVIDIA}, A100 80GB SXM"),
        Gpu("h100", 989e12, 1979e12, 80e9, 3.35e12, f"{_NVIDIA}, H100 SXM"),
        Gpu("h200", 989e12, 1979e12, 141e9, 4.8e12, f"{_NVIDIA}, H200 SXM"),
        Gpu("b200", 2250e12, 4500e12, 180e9, 8e12, "NVIDIA's data sheet of the DGX B200, an eighth of it"),
        Gpu("l40s", 362e12, 733e12, 48e9, 864e9, f"{_NVIDIA}, L40S", peer_bytes_per_second=_PCIE_4),
        Gpu(
            "mi300x",
            1307.4e12,
            2614.9e12,
            192e9,
            5.3e12,
            "AMD's data sheet; share of peak between published serving runs of an 8B model on vLLM 0.26, in which an "
            "H200 is 1.4 (balanced) to 2.1 times (long prompts) as fast: github.com/alpharomercoma/MI300X-vs-H200",
            prefill_share=0.25,
        ),
    )
}

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("g6e.xlarge", "l40s", 1, 20),
        Machine("g6e.2xlarge", "l40s", 1, 20),
        Machine("g6e.4xlarge", "l40s", 1, 20),
        Machine("g6e.8xlarge", "l40s", 1, 25),
        Machine("g6e.16xlarge", "l40s", 1, 35),
        Machine("g6e.12xlarge", "l40s", 4, 100),
        Machine("g6e.24xlarge", "l40s", 4, 200),
        Machine("g6e.48xlarge", "l40s", 8, 400),
        Machine("p4de.24xlarge", "a100", 8, 400),
        Machine("p5.48xlarge", "h100", 8, 3200),
        Machine("p5en.48xlarge", "h200", 8, 3200),
        Machine("p6-b200.48xlarge", "b200", 8, 3200),
    )
}
"""AWS's tables of accelerated instance types; the network is the most that a machine may have."""

_ETHERNET = "line rate less headers and one stream's share over TCP; latency of a connected socket and a reply"
_RDMA = "0.9 of line rate and 5 ms for the control round trip, as in published replays with pulls"

LINKS = {
    link.name: link
    for link in (
        Link("10gbe", 10, 0.88, 0.005, _ETHERNET),
        Link("25gbe", 25, 0.88, 0.005, _ETHERNET),
        Link("100gbe", 100, 0.8, 0.005, _ETHERNET),
        Link("roce-200", 200, 0.9, 0.005, _RDMA),
        Link("roce-400", 400, 0.9, 0.005, _RDMA),
        Link("roce-8x200", 1600, 0.71, 0.0005, "Mooncake's transfer engine over 8 RoCE ports: 142 GB/s, 0.54 ms fixed"),
        Link(
            "nixl-host",
            28.0,
            1.0,
            0.027,
            "fitted to llm-d's pulls of gpt-oss-120b between two H200 pods, host memory to host memory over NIXL and "
            "from there to the GPU: 49 ms for 2,048 tokens, 550.5 ms for 49,152 (guides/p2p-kv-cache-sharing)",
        ),
    )
}

TIERS = {
    tier.name: tier
    for tier in (
        Tier("memory", float("inf"), 0.0, "a peer's GPU memory, read by the network card itself"),
        Tier(
            "host",
            43e9,
            0.0,
            "PCIe 5 x16, 54 GB/s from pinned memory measured on an H20 host, less a fifth for pages; eight GPUs stay "
            "below what two sockets of DDR5 read",
            gpus_max=8,
            has_local=True,
        ),
        Tier(
            "nvme",
            12e9,
            0.0005,
            "two PCIe 4 drives of 7 GB/s each, data sheets, less a seventh for the file system",
            has_local=True,
        ),
        Tier("object", 2.5e9, 0.05, "S3-compatible stores with some dozen parallel reads; first byte in tens of ms"),
    )
}

_CODEC_CORES = 8
_COPY_BYTES_PER_SECOND = 10e9
"""Of one server core."""
_CODEC_RATE = _CODEC_CORES * _COPY_BYTES_PER_SECOND

CODECS = {
    codec.name: codec
    for codec in (
        Codec("raw", 1.0, float("inf")),
        Codec("i8", 1.94, 0.4 * _CODEC_RATE),
        Codec("i4h", 3.56, 0.1 * _CODEC_RATE),
        Codec("lm3h", 4.13, 0.1 * _CODEC_RATE),
    )
}
CODECS_SOURCE = (
    "docs/decisions/codecs.md: sizes against bf16 with 64 elements a head, and rates as shares of a plain copy, on "
    "eight cores of the host, where codes are made and read"
)

_Value = TypeVar("_Value")


def named(kind: str, table: Mapping[str, _Value], name: str) -> _Value:
    """Raises ValueError that lists what there is."""
    found = table.get(name.lower())
    if found is None:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(table)}")
    return found


def link_of(text: str) -> Link:
    """A link by name, or one of so many Gb/s: 40 or fewer are taken for Ethernet, more for RDMA."""
    try:
        gbps = float(text)
    except ValueError:
        return named("link", LINKS, text)
    if not 0 < gbps < float("inf"):
        raise ValueError(f"a link has more than 0 Gb/s, not {text}")
    like = LINKS["10gbe"] if gbps <= 40 else LINKS["roce-400"]
    return like._replace(name=f"{gbps:g} Gb/s", gbps=gbps)


class Hardware(NamedTuple):
    """What `--gpu` names: a GPU, or a machine with some."""

    gpu: Gpu
    gpus: int | None
    """In the machine; None where only a GPU was named."""
    network_gbps: float | None


def hardware_of(name: str) -> Hardware:
    """A GPU, a machine, or a family of machines with one kind of GPU. Raises ValueError that lists what there is."""
    wanted = name.lower()
    machine = MACHINES.get(wanted)
    if machine is not None:
        return Hardware(GPUS[machine.gpu], machine.gpus, machine.network_gbps)
    families = {one.name.partition(".")[0]: one.gpu for one in MACHINES.values()}
    if wanted in GPUS or wanted in families:
        return Hardware(GPUS[families.get(wanted, wanted)], None, None)
    raise ValueError(f"no GPU or machine {name!r}; there are {', '.join([*GPUS, *families, *MACHINES])}")
