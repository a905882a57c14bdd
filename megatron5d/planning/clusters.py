"""Devices and networks as data: peaks from data sheets, and the share that training reaches.

Sources, all without sparsity and for one direction unless stated: NVIDIA A100 data sheet (312
TFLOP/s bf16, 1,555 and 2,039 GB/s, NVLink 600 GB/s both ways; PCIe 1,935 GB/s), H100 (SXM 989 and
1,979 TFLOP/s in FP8, 3.35 TB/s, NVLink 900 GB/s; NVL 835, 3.9 TB/s, bridges of 600 GB/s between
two; PCIe 756, 2 TB/s), H200 (4.8 TB/s, 141 GB; NVL 835, bridges of 900 GB/s between up to four),
DGX B200 (2,250 and 4,500 TFLOP/s, 8 TB/s, NVLink 1.8 TB/s both ways, 180 GB), GB200 NVL72 (2,500
and 5,000 TFLOP/s, 186 GB, 72 devices on one NVLink), GH200 (H100's peaks, 96 GB, 4 TB/s, one device
a node, NVLink-C2C of 900 GB/s both ways to Grace). PCIe without a bridge: 64 GB/s both ways (A100),
128 (H100). To the host, one way: PCIe 4.0 and 5.0, 32 GB/s (A100) and 64 (later ones); GB200 225
(NVLink-C2C, 900 GB/s both ways for two devices). The host's memory, a device's share: DGX A100 (16
channels of DDR4-3200, 410 GB/s), DGX H100 (16 of DDR5-4800, 614 GB/s), Grace (512 GB/s for two
devices). Between nodes: one adapter a device, HDR InfiniBand (200 Gbit/s) for A100, NDR (400
Gbit/s) for the later ones. Latencies are assumptions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks, fitted on published runs (docs/notes/planning.md lists them).

    Args:
        gemms: of the FLOP/s, in GEMMs; the time for their bytes is added.
        attention: of the FLOP/s, in attention between queries, keys and values.
        memory: of the device's memory bandwidth.
        links: of a link's bandwidth; an assumption.
        kernel_s: seconds that every kernel takes at least.
    """

    gemms: float
    attention: float
    memory: float = 0.62
    links: float = 0.75
    kernel_s: float = 8.6e-6


AMPERE = Efficiency(gemms=0.80, attention=0.29)
# Also used for newer devices, for which no runs were fitted.
HOPPER = Efficiency(gemms=0.56, attention=0.31)


@dataclass(frozen=True)
class Cluster:
    """One kind of device, and the links between them.

    Args:
        name: as `--device` takes it.
        flops: FLOP/s in 16 bits.
        flops_8bit: in FP8; as `flops` if the device has no FP8 GEMMs.
        memory_bytes: of one device, as CUDA reports it, rounded down to GiB.
        memory_rate: bytes/s.
        link_rate: bytes/s that a device sends to others of its node.
        node: ranks that share those links.
        network_rate: bytes/s that a device sends to other nodes.
        host_rate: bytes/s between a device and the host, one way.
        host_memory_rate: bytes/s of the host's memory, one device's share.
        link_s: latency of a hop inside a node, seconds.
        network_s: latency of a hop between nodes, seconds.
        architecture: of the GPU, for the memory forecast.
        efficiency: the share of these peaks that training reaches.
        pattern: part of the device's name in CUDA that identifies it; "" = none.
    """

    name: str
    flops: float
    flops_8bit: float
    memory_bytes: int
    memory_rate: float
    link_rate: float
    node: int = 8
    network_rate: float = 50 * GB
    host_rate: float = 64 * GB
    host_memory_rate: float = 76.8e9
    link_s: float = 3e-6
    network_s: float = 10e-6
    architecture: str = "sm_90"
    efficiency: Efficiency = field(default=HOPPER)
    pattern: str = ""

    def group(self, ranks: Sequence[int]) -> RankGroup:
        """The ranks of a group, and how many of them are in the node of the first.

        Args:
            ranks: global ranks, ascending.
        """
        in_node = bisect_left(ranks, (ranks[0] // self.node + 1) * self.node)
        return RankGroup(len(ranks), in_node)

    def seconds(self, group: RankGroup, op: str, calls: float, num_bytes: float) -> float:
        """Seconds of collectives that nothing overlaps with.

        A ring leaves each node once, over one adapter for each of the group's ranks there. In a
        shift or a send, one rank of the node sends over its own adapter. In an all-to-all, every
        rank sends equal shares to all ranks of the group, to other nodes over its own adapter.

        Args:
            group: the ranks that communicate.
            op: name in the ledger: all_reduce, all_gather, reduce_scatter, all_to_all, shift, put,
                or send.
            calls: number of collectives.
            num_bytes: bytes that this rank sends in all of them together.
        """
        if group.size == 1 or not calls:
            return 0.0
        links = self.efficiency.links
        link_rate, network_rate = self.link_rate * links, self.network_rate * links
        hops = 1 if op in ("shift", "send") else math.ceil(math.log2(group.size))
        inside = min(hops, math.ceil(math.log2(group.in_node)) if group.in_node > 1 else 0)
        hops_s = inside * self.link_s + (hops - inside) * self.network_s
        latency = calls * (hops_s + self.efficiency.kernel_s)
        if group.in_node == group.size:
            return latency + num_bytes / link_rate
        if op == "all_to_all":
            outside = (group.size - group.in_node) / (group.size - 1)
            network_s = num_bytes * outside / network_rate
            return latency + max(network_s, num_bytes * (1 - outside) / link_rate)
        adapters = 1 if op in ("shift", "send") else group.in_node
        return latency + num_bytes / min(link_rate, network_rate * adapters)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate."""

    size: int
    in_node: int  # number of ranks in one node


_A100 = Cluster(
    "a100_80gb",
    312e12,
    312e12,
    79 * GIB,
    2039e9,
    300e9,
    network_rate=25e9,
    host_rate=32 * GB,
    host_memory_rate=51.2e9,
    architecture="sm_80",
    efficiency=AMPERE,
    pattern="A100",
)
_H100 = Cluster("h100_sxm", 989e12, 1979e12, 79 * GIB, 3350e9, 450e9, pattern="H100")
_H200 = replace(_H100, name="h200", memory_bytes=139 * GIB, memory_rate=4800e9, pattern="H200")
_B200 = Cluster(
    "b200", 2250e12, 4500e12, 178 * GIB, 8000e9, 900e9, architecture="sm_100", pattern="B200"
)
_NVL = replace(_H100, flops=835e12, flops_8bit=1671e12)

CLUSTERS: Mapping[str, Cluster] = {
    cluster.name: cluster
    for cluster in (  # the first one whose pattern is in a device's name describes it
        replace(
            _B200,
            name="gb200",
            flops=2500e12,
            flops_8bit=5000e12,
            memory_bytes=184 * GIB,
            node=72,
            pattern="GB200",
            host_rate=225 * GB,
            host_memory_rate=256e9,
        ),
        _B200,
        replace(
            _H100,
            name="gh200",
            memory_bytes=94 * GIB,
            memory_rate=4000e9,
            node=1,
            host_rate=450 * GB,
            host_memory_rate=512e9,
            pattern="GH200",
        ),
        replace(
            _NVL,
            name="h200_nvl",
            memory_bytes=139 * GIB,
            memory_rate=4800e9,
            node=4,
            pattern="H200 NVL",
        ),
        _H200,
        replace(
            _NVL,
            name="h100_nvl",
            memory_bytes=93 * GIB,
            memory_rate=3900e9,
            link_rate=300e9,
            node=2,
            pattern="H100 NVL",
        ),
        Cluster("h100_pcie", 756e12, 1513e12, 79 * GIB, 2000e9, 64e9, pattern="H100 PCIe"),
        _H100,
        replace(
            _A100,
            name="a100_40gb",
            memory_bytes=39 * GIB,
            memory_rate=1555e9,
            pattern="A100-SXM4-40GB",
        ),
        replace(
            _A100, name="a100_pcie", memory_rate=1935e9, link_rate=32e9, pattern="A100 80GB PCIe"
        ),
        _A100,
    )
}


SHORT_NAMES = {"a100": "a100_80gb", "h100": "h100_sxm"}


def cluster_called(name: str) -> Cluster:
    """The cluster with a name of CLUSTERS or SHORT_NAMES.

    Raises:
        ValueError: there is none.
    """
    if is_cluster(name):
        return CLUSTERS[SHORT_NAMES.get(name.lower(), name.lower())]
    names = ", ".join(sorted({*CLUSTERS, *SHORT_NAMES}))
    raise ValueError(
        f"--device must be one of {names} (got {name}); for another device take the nearest of "
        "these, with --device-gb and --tflops of yours"
    )


def is_cluster(name: str) -> bool:
    """Whether CLUSTERS or SHORT_NAMES has this name, in any case."""
    return name.lower() in {*CLUSTERS, *SHORT_NAMES}


def cluster_of(device_name: str) -> Cluster | None:
    """The cluster of a device, given its name in CUDA; None for an unknown device."""
    matching = (c for c in CLUSTERS.values() if c.pattern and c.pattern in device_name)
    return next(matching, None)
