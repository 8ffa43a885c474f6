"""The bundled machines: each number with its source (the tags are those of docs/planner.md).

At most one number of a machine is fitted, on one published row, and `fitted` says which.
"""

from __future__ import annotations

from megabatch.planner.machine import JITTER, Machine, Network, Node, Rate, Spine
from megabatch.planner.step import pass_seconds
from megabatch.planner.workload import usual

# Machines of 2017 and 2018: one message from GPU to GPU over NVLink and over InfiniBand, from the
# public performance model of ABCI; there is no public figure for the others of their day.
_ABCI = "public model of ABCI [found: S18]"
_NVLINK_2018, _NET_2018 = 9e-6, 40.5e-6
_PCIE_2018 = 10e-6  # assumed: 5 to 15 us are usual
# Machines since: NCCL's own model (src/graph/tuning.cc): to start a ring, and one hop of it over
# NVLink and the network, protocol Simple; the network's was 9.6 us up to the A100's day.
_NCCL = "NCCL's tuning model [found: S15]"
_LAUNCH, _NVLINK, _NET, _NET_2021 = 8.4e-6, 3.4e-6, 14e-6, 9.6e-6
_PCIE3 = 12e9
_ASSUMED_JITTER = (
    "assumed, one constant for all machines without a fit of their own, chosen with four published "
    "rows in view; not measured"
)


def _machines() -> list[Machine]:
    return [
        Machine(
            name="bigbasin-p100",
            workers_per_node=8,
            node=Node(_NVLINK_2018, 4 * 18e9),
            network=Network(_NET_2018, 6.25e9),
            rates=(Rate("resnet50", 32, 256 * 90 * 1_281_167 / 256 / (29 * 3600) / 8, workers=8),),
            launch_seconds=_LAUNCH,
            largest_micro=64,
            sources={
                "node": f"4 NVLinks of 18 GB/s that NCCL uses [found: S1, S15]; latency: {_ABCI}",
                "network": f"one 50 GbE NIC [found: S1]; latency: {_ABCI}",
                "rates": "90 epochs in 29 h on 8 GPUs, 32 images each [found: S1]",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="mn1-p100",
            workers_per_node=8,
            node=Node(_PCIE_2018, _PCIE3),
            network=Network(_NET_2018, 6.8e9, nics=2),
            rates=(Rate("resnet50", 32, 90 * 1_281_167 / 900 / 1024 / 0.80),),
            launch_seconds=_LAUNCH,
            largest_micro=64,
            sources={
                "node": "PCIe 3 x16 [recalled M], 12 GB/s in NCCL [found: S15]; 10 us is assumed",
                "network": f"FDR, 54.5 Gbit/s net of coding [found: S7]; two of them [recalled M]; "
                f"latency: {_ABCI}",
                "rates": "90 epochs in 15 min on 1,024 GPUs at 80 % [derived: S26, S7]: the "
                "efficiency can be tested against it, the time cannot",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="tencent-p40",
            workers_per_node=8,
            node=Node(_PCIE_2018, _PCIE3),
            network=Network(_NET_2018, 12.5e9),
            rates=(Rate("resnet50", 64, 218.0),),
            launch_seconds=_LAUNCH,
            largest_micro=128,
            sources={
                "node": "PCIe 3 x16 [recalled M], 12 GB/s in NCCL [found: S15]; 10 us is assumed",
                "network": f"one 100 GbE NIC [found: S7]; latency: {_ABCI}",
                "rates": "one P40, mixed precision [found: S5]; at how many images is not known",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="abci",
            workers_per_node=4,
            node=Node(_NVLINK_2018, 50e9),
            network=Network(_NET_2018, 10e9, nics=2),
            spine=Spine(41e-6, nodes_per_rack=34, oversubscription=3.0),
            rates=(Rate("resnet50", 16, 2565 / 4, workers=4),),
            jitter=0.0118,
            launch_seconds=_LAUNCH,
            largest_micro=64,
            fitted="jitter",
            sources={
                "node": "NVLink 2, 50 GB/s a pair of GPUs, 9 us end to end [found: S18]",
                "network": "2 EDR NICs of which 20 GB/s are usable; 40.5 us in a rack "
                "[found: S18, S19]",
                "spine": "34 nodes a rack, 3:1, 41 us [found: S18, S19]",
                "rates": "2,565 images/s on 4 GPUs [recalled H]; 16 images each is assumed",
                "jitter": "fitted on the 1,024-GPU row of Mikami 2018",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="stampede2-knl",
            workers_per_node=1,
            network=Network(10e-6, 12.5e9),
            rates=(Rate("resnet50", 16, 90 * 1_281_167 / (45 * 3600) / 16, workers=16),),
            largest_micro=64,
            sources={
                "network": "Omni-Path, 100 Gbit/s [recalled H]; 10 us is assumed",
                "rates": "90 epochs in 45 h on 16 KNL, batch 256 [seed]",
                "jitter": _ASSUMED_JITTER,
            },
        ),
        Machine(
            name="stampede2-skx",
            workers_per_node=2,
            node=Node(5e-6, 20e9),
            network=Network(10e-6, 12.5e9),
            rates=(Rate("resnet50", 16, 40.79),),
            largest_micro=64,
            fitted="rates",
            sources={
                "node": "UPI between the two sockets, 2 links of 10.4 GB/s [recalled M]; 5 us is "
                "assumed",
                "network": "Omni-Path, 100 Gbit/s [recalled H]; 10 us is assumed",
                "rates": "fitted on the row of 1,024 CPUs (52 min)",
                "jitter": _ASSUMED_JITTER,
            },
        ),
        Machine(
            name="horovod-v100-10gbe",
            workers_per_node=6,
            node=Node(_NVLINK_2018, 6 * 20e9),
            network=Network(35e-6, 1.25e9, flow_bytes_per_second=0.542e9),
            rates=(Rate("resnet50", 192, 1200.0),),
            launch_seconds=_LAUNCH,
            largest_micro=256,
            fitted="network.flow_bytes_per_second",
            sources={
                "node": f"6 NVLinks of 20 GB/s [found: S15]; latency: {_ABCI}",
                "network": "one 10 GbE NIC [found: S20]; 523 us over the 14 steps of a ring of 8 "
                "[found: S21]; one TCP flow's share is fitted on the flat ring's row",
                "rates": "one V100, PyTorch [found: S11]",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="dgx-a100",
            workers_per_node=8,
            node=Node(_NVLINK, 208e9),
            network=Network(_NET_2021, 24e9, nics=8),
            rates=(
                Rate("resnet50", 256, 3411.0),
                Rate("resnet50", 408, 3260.0, workers=8),
            ),
            launch_seconds=_LAUNCH,
            largest_micro=512,
            sources={
                "node": f"208 GB/s measured [found: nccl-tests #178]; a hop: {_NCCL}",
                "network": "8 HDR NICs; 96 of 100 GB/s on four of them [found: nccl-tests #119]; "
                f"a hop: {_NCCL}, v2.8.4",
                "rates": "MXNet on one [found: S11; its batch of 256 recalled M], MLPerf v2.0 on "
                "eight, evaluation included [found: S8]",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="dgx-h100",
            workers_per_node=8,
            node=Node(_NVLINK, 370e9),
            network=Network(_NET, 47e9, nics=8),
            rates=_h100(),
            launch_seconds=_LAUNCH,
            sources={
                "node": f"18 NVLinks of 20.6 GB/s; a hop: {_NCCL}",
                "network": f"8 NDR NICs of 46 to 48 GB/s in NCCL [found: S15 #290]; a hop: {_NCCL}",
                "rates": "7,160 at 400 images on eight, MLPerf v4.0 [found: S8]; other sizes in "
                "the proportions of hgx-h200's",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="hgx-h200",
            workers_per_node=8,
            node=Node(_NVLINK, 370e9),
            network=Network(_NET, 47e9, nics=8),
            rates=_h200(),
            launch_seconds=_LAUNCH,
            largest_micro=1536,
            sources={
                "node": f"18 NVLinks of 20.6 GB/s; a hop: {_NCCL}",
                "network": f"8 NDR NICs of 46 to 48 GB/s in NCCL [found: S15 #290]; a hop: {_NCCL}",
                "rates": "measured on one: PyTorch, torch.compile, bf16, channels last",
                "jitter": _ASSUMED_JITTER,
                "launch_seconds": _NCCL,
            },
        ),
    ]


# One H200, ResNet-50 at 224 px, torch.compile, bf16, channels last: images/s by micro-batch. Those
# at 50 and 400 are of a step captured as one CUDA graph (results/gpu/step-compiled.json).
_H200 = {50: 4968.0, 256: 6834.0, 400: 7143.0, 1024: 7415.0}


def _h100() -> tuple[Rate, ...]:
    """MLPerf's rate at 400 images; at the sizes measured on an H200, in proportion to it."""
    h200 = Machine("h200", 1, rates=_h200())
    net = usual("resnet50")

    def rate(micro: int) -> float:
        return micro / pass_seconds(h200, net, micro)

    return tuple(
        Rate("resnet50", micro, 7160.0 * rate(micro) / rate(400), workers=8)
        for micro in sorted({400, *_H200})
    )


def _h200() -> tuple[Rate, ...]:
    return tuple(Rate("resnet50", micro, rate) for micro, rate in _H200.items())


MACHINES = {machine.name: machine for machine in _machines()}

__all__ = ["JITTER", "MACHINES"]
