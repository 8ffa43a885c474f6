"""The bundled machines: each number with its source (the tags are those of docs/planner.md).

At most one number of a machine is fitted, on one published row, and `fitted` says which. Prices are
on demand, in dollars, of the date that their source has.
"""

from __future__ import annotations

from megabatch.planner.machine import Machine, Network, Node, Rate, Spine

# Machines of 2017 and 2018: one message from GPU to GPU over NVLink and over InfiniBand, from the
# public performance model of ABCI; there is no public figure for the others of their day.
_ABCI = "public model of ABCI [found: S18]"
_NVLINK_2018, _NET_2018 = 9e-6, 40.5e-6
_PCIE_2018 = 10e-6  # assumed: 5 to 15 us are usual
# Machines since: NCCL's own model (src/graph/tuning.cc): to start a ring, and one hop of it over
# NVLink and the network, protocol Simple; the network's was 9.6 us up to the A100's day.
_NCCL = "NCCL's tuning model [found: S15]"
_LAUNCH, _NVLINK, _NET, _NET_2021 = 8.4e-6, 3.4e-6, 14e-6, 9.6e-6
_CLOUD_NET = 30e-6  # assumed for EFA and for TCP past the kernel
_PCIE3 = 12e9
_JITTER = (
    "2.5 %, one value for all machines without a fit of their own: eight GPUs of a node lose 1 to "
    "3 % to each other [found: S8, S30]"
)
_SENDING = (
    "1.8 times the share of multiprocessors that NCCL's channels hold, 0.22 at most, as measured "
    "on one H200 (results/planner); 2 channels a NIC and 16 at most are assumed"
)
_DECODED = 1263.0  # images/s of one core, 256-pixel packs: 20,208 on 16 cores (results/gpu)


def _taken(channels: int, multiprocessors: int) -> float:
    """Beside 8, 16 and 24 thread blocks that copy and add, a ResNet-50 step on one H200 of 132
    multiprocessors loses 0.11, 0.22 and 0.22 of its speed (results/planner/overlap-h200.jsonl)."""
    return min(0.22, 1.8 * channels / multiprocessors)


def _on(machine: Machine, **more: str) -> Machine:
    """With the sources that all of them share."""
    machine.sources.update(
        {"jitter": _JITTER} | ({"sending_share": _SENDING} if machine.sending_share else {}) | more
    )
    return machine


def _of_the_papers() -> list[Machine]:
    return [
        Machine(
            name="bigbasin-p100",
            chip="p100",
            workers_per_node=8,
            node=Node(_NVLINK_2018, 4 * 18e9),
            network=Network(_NET_2018, 6.25e9),
            rates=(Rate("resnet50", 32, 256 * 90 * 1_281_167 / 256 / (29 * 3600) / 8, workers=8),),
            launch_seconds=_LAUNCH,
            sending_share=_taken(2, 56),
            sources={
                "node": f"4 NVLinks of 18 GB/s that NCCL uses [found: S1, S15]; latency: {_ABCI}",
                "network": f"one 50 GbE NIC [found: S1]; latency: {_ABCI}",
                "rates": "90 epochs in 29 h on 8 GPUs, 32 images each [found: S1]",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="mn1-p100",
            chip="p100",
            workers_per_node=8,
            node=Node(_PCIE_2018, _PCIE3),
            network=Network(_NET_2018, 6.8e9, nics=2),
            rates=(Rate("resnet50", 32, 90 * 1_281_167 / 900 / 1024 / 0.80),),
            launch_seconds=_LAUNCH,
            sources={
                "node": "PCIe 3 x16 [recalled M], 12 GB/s in NCCL [found: S15]; 10 us is assumed",
                "network": f"FDR, 54.5 Gbit/s net of coding [found: S7]; two of them [recalled M]; "
                f"latency: {_ABCI}",
                "rates": "90 epochs in 15 min on 1,024 GPUs at 80 % [derived: S26, S7]: the "
                "efficiency can be tested against it, the time cannot",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="tencent-p40",
            chip="p40",
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
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="abci",
            chip="v100",
            workers_per_node=4,
            node=Node(_NVLINK_2018, 50e9),
            network=Network(_NET_2018, 10e9, nics=2),
            spine=Spine(41e-6, nodes_per_rack=34, oversubscription=3.0),
            rates=(Rate("resnet50", 16, 2565 / 4, workers=4),),
            jitter=0.0118,
            launch_seconds=_LAUNCH,
            fitted="jitter",
            sources={
                "node": "NVLink 2, 50 GB/s a pair of GPUs, 9 us end to end [found: S18]",
                "network": "2 EDR NICs of which 20 GB/s are usable; 40.5 us in a rack "
                "[found: S18, S19]",
                "spine": "34 nodes a rack, 3:1, 41 us [found: S18, S19]",
                "rates": "2,565 images/s on 4 GPUs [recalled H]; 16 images each is assumed",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="stampede2-knl",
            chip="cpu",
            workers_per_node=1,
            network=Network(10e-6, 12.5e9),
            rates=(Rate("resnet50", 16, 90 * 1_281_167 / (45 * 3600) / 16, workers=16),),
            largest_micro=64,
            sources={
                "network": "Omni-Path, 100 Gbit/s [recalled H]; 10 us is assumed",
                "rates": "90 epochs in 45 h on 16 KNL, batch 256 [seed]",
            },
        ),
        Machine(
            name="stampede2-skx",
            chip="cpu",
            workers_per_node=2,
            node=Node(5e-6, 20e9),
            network=Network(10e-6, 12.5e9),
            rates=(Rate("resnet50", 16, 39.08),),
            largest_micro=64,
            fitted="rates",
            sources={
                "node": "UPI between the two sockets, 2 links of 10.4 GB/s [recalled M]; 5 us is "
                "assumed",
                "network": "Omni-Path, 100 Gbit/s [recalled H]; 10 us is assumed",
                "rates": "fitted on the row of 1,024 CPUs (52 min)",
            },
        ),
        Machine(
            name="horovod-v100-10gbe",
            chip="v100",
            workers_per_node=6,
            node=Node(_NVLINK_2018, 6 * 20e9),
            network=Network(35e-6, 1.25e9, flow_bytes_per_second=0.542e9),
            rates=(Rate("resnet50", 192, 1200.0),),
            launch_seconds=_LAUNCH,
            fitted="network.flow_bytes_per_second",
            sources={
                "node": f"6 NVLinks of 20 GB/s [found: S15]; latency: {_ABCI}",
                "network": "one 10 GbE NIC [found: S20]; 523 us over the 14 steps of a ring of 8 "
                "[found: S21]; one TCP flow's share is fitted on the flat ring's row",
                "rates": "one V100, PyTorch [found: S11]",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="horovod-p100-25gbe",
            chip="p100",
            workers_per_node=4,
            node=Node(_PCIE_2018, _PCIE3),
            network=Network(_NET_2018, 3.125e9, transport="roce"),
            rates=(
                Rate("resnet101", 64, 1656.82 / 16, workers=16),
                Rate("vgg16", 64, 154.0),
            ),
            launch_seconds=_LAUNCH,
            sending_share=_taken(2, 56),
            sources={
                "node": "PCIe 3 x16 is assumed, 12 GB/s in NCCL [found: S15]; 10 us is assumed",
                "network": f"one RoCE-capable 25 GbE NIC [found: S20]; latency: {_ABCI}",
                "rates": "ResNet-101 on 16 P100 [found: S20]; VGG-16 on one [found: S30]",
                "launch_seconds": _NCCL,
            },
        ),
    ]


def _of_nvidia() -> list[Machine]:
    return [
        Machine(
            name="dgx1-v100",
            chip="v100",
            workers_per_node=8,
            node=Node(_NVLINK_2018, 6 * 20e9),
            network=Network(_NET_2021, 12.5e9, nics=4, transport="infiniband"),
            rates=(Rate("resnet50", 192, 1376.0),),
            launch_seconds=_LAUNCH,
            sending_share=_taken(8, 80),
            watts_per_gpu=3500 / 8,
            sources={
                "node": f"6 NVLinks of 20 GB/s [found: S15]; latency: {_ABCI}",
                "network": f"4 EDR NICs [recalled H]; a hop: {_NCCL}, v2.8.4",
                "rates": "MXNet on one, 192 images [found: S11]",
                "watts_per_gpu": "3.5 kW a node at most [recalled H]",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="dgx2h",
            chip="v100",
            workers_per_node=16,
            node=Node(_NVLINK_2018, 6 * 20e9),
            network=Network(_NET_2021, 12.5e9, nics=8, transport="infiniband"),
            rates=(Rate("resnet50", 208, 1578.0, workers=16),),
            launch_seconds=_LAUNCH,
            sending_share=_taken(16, 80),
            watts_per_gpu=12_000 / 16,
            sources={
                "node": f"6 NVLinks of 20 GB/s [found: S15]; latency: {_ABCI}",
                "network": f"8 EDR NICs [recalled H]; a hop: {_NCCL}, v2.8.4",
                "rates": "MLPerf v0.7, 208 images on 16 [found: S8]",
                "watts_per_gpu": "12 kW a node at most [recalled H]",
                "launch_seconds": _NCCL,
            },
        ),
        Machine(
            name="dgx-a100",
            chip="a100",
            workers_per_node=8,
            node=Node(_NVLINK, 208e9),
            network=Network(_NET_2021, 24e9, nics=8),
            rates=(Rate("resnet50", 408, 27_182 / 8, workers=8),),
            launch_seconds=_LAUNCH,
            sending_share=_taken(16, 108),
            input_images_per_second=128 * _DECODED,
            watts_per_gpu=6500 / 8,
            sources={
                "node": f"208 GB/s measured [found: nccl-tests #178]; a hop: {_NCCL}",
                "network": "8 HDR NICs; 96 of 100 GB/s on four of them [found: nccl-tests #119]; "
                f"a hop: {_NCCL}, v2.8.4",
                "rates": "MLPerf v2.0, 408 images on eight [found: S8]",
                "input_images_per_second": "128 cores, 256-pixel packs, by results/gpu",
                "watts_per_gpu": "6.5 kW a node at most [recalled H]",
                "launch_seconds": _NCCL,
            },
        ),
        _hopper("dgx-h100", "h100", (Rate("resnet50", 400, 57_450 / 8, workers=8),),
                "MLPerf v4.0, 400 images on eight [found: S8]"),
        _hopper("hgx-h200", "h200",
                tuple(Rate(net, n, rate) for net in _H200 for n, rate in _H200[net].items()),
                "measured on one, bf16, 2026-11-15: ResNet-50 by megabatch bench step, the others "
                "as torch has them (results/planner)"),
        Machine(
            name="dgx-b200",
            chip="b200",
            workers_per_node=8,
            node=Node(_NVLINK, 2 * 370e9),
            network=Network(_NET, 47e9, nics=8),
            rates=(Rate("resnet50", 400, 19_500.0, assumed=True),),
            launch_seconds=_LAUNCH,
            sending_share=_taken(16, 148),
            input_images_per_second=112 * _DECODED,
            watts_per_gpu=14_300 / 8,
            sources={
                "node": "twice the NVLink of an H100 [recalled H], as much of it used",
                "network": f"8 NICs of 400 Gbit/s [recalled H], as an H100's; a hop: {_NCCL}",
                "rates": "assumed, nobody published it: one H200's step, its products 2.3 and its "
                "moves 1.6 times as fast",
                "input_images_per_second": "112 cores, 256-pixel packs, by results/gpu",
                "watts_per_gpu": "14.3 kW a node at most [recalled H]",
                "launch_seconds": _NCCL,
            },
        ),
    ]  # fmt: skip


# One H200, torch 2.11, bf16, 2026-11-15: images/s by images in a pass. ResNet-50 is the trainer's
# own step (results/planner/h200.json); the others are torchvision's nets, not compiled, a step
# captured as one CUDA graph (results/planner/passes-h200.jsonl).
_H200 = {
    "resnet50": {16: 3098.1, 32: 4698.8, 64: 6475.4, 128: 8391.9, 256: 10_077.0, 512: 11_057.8,
                 1024: 11_654.1},
    "vgg16": {16: 2236.4, 64: 3264.6, 256: 3661.2, 512: 3673.6},
    "vit_b_16": {16: 1687.2, 64: 2127.1, 256: 2354.4, 512: 2453.7},
    "convnext_tiny": {16: 1661.6, 64: 2497.5, 256: 3030.5, 512: 3239.8},
}  # fmt: skip


def _hopper(name: str, chip: str, rates: tuple[Rate, ...], source: str) -> Machine:
    return Machine(
        name=name,
        chip=chip,
        workers_per_node=8,
        node=Node(_NVLINK, 370e9),
        network=Network(_NET, 47e9, nics=8),
        rates=rates,
        launch_seconds=_LAUNCH,
        sending_share=_taken(16, 132),
        input_images_per_second=112 * _DECODED,
        watts_per_gpu=10_200 / 8,
        sources={
            "node": f"18 NVLinks of 20.6 GB/s; a hop: {_NCCL}",
            "network": f"8 NDR NICs of 46 to 48 GB/s in NCCL [found: S15 #290]; a hop: {_NCCL}",
            "rates": source,
            "input_images_per_second": "112 cores, 256-pixel packs, by results/gpu",
            "watts_per_gpu": "10.2 kW a node at most [recalled H]",
            "launch_seconds": _NCCL,
        },
    )


def _of_clouds(dgx: dict[str, Machine]) -> list[Machine]:
    """Chips and links inside a node as in NVIDIA's own machines; the network is the cloud's."""
    return [
        _cloud("p3dn.24xlarge", dgx["dgx1-v100"], Network(_CLOUD_NET, 12.5e9, transport="efa"),
               31.212, "31.21 an instance, us-east-1 [recalled H, 2023]",
               "100 Gbit/s by EFA [recalled H]", 48),
        _cloud("p4d.24xlarge", dgx["dgx-a100"],
               Network(_CLOUD_NET, 12.5e9, nics=4, transport="efa"),
               32.77, "32.77 an instance, us-east-1, 2024 [found: S33]",
               "4 x 100 Gbit/s by EFA [found: S33]", 48),
        _cloud("p5.48xlarge", dgx["dgx-h100"], Network(_CLOUD_NET, 50e9, nics=8, transport="efa"),
               98.32, "98.32 an instance, early 2026 [found: S33]; reserved blocks 39.33, 2024",
               "3,200 Gbit/s by EFA [found: S33]", 96),
        _cloud("a3-highgpu-8g", dgx["dgx-h100"],
               Network(_CLOUD_NET, 25e9, nics=4, transport="tcp"),
               88.25, "88.25 an instance, us-central1 [recalled M, 2024]",
               "4 x 200 Gbit/s by TCP past the kernel [found: S34]", 104),
        _cloud("nd-h100-v5", dgx["dgx-h100"],
               Network(_NET, 50e9, nics=8, transport="infiniband"),
               98.32, "98.32 an instance, East US [recalled H, 2024]",
               "8 x 400 Gbit/s InfiniBand [recalled H]", 48),
        _cloud("nd-a100-v4", dgx["dgx-a100"],
               Network(_NET_2021, 25e9, nics=8, transport="infiniband"),
               32.77, "32.77 an instance, East US [recalled M, 2024]",
               "8 x 200 Gbit/s InfiniBand [recalled H]", 48),
    ]  # fmt: skip


def _cloud(
    name: str, like: Machine, network: Network, dollars: float, price: str, source: str, cores: int
) -> Machine:
    latency = "" if network.latency_seconds != _CLOUD_NET else "; 30 us is assumed"
    return Machine(
        name=name,
        chip=like.chip,
        workers_per_node=like.workers_per_node,
        node=like.node,
        network=network,
        rates=like.rates,
        launch_seconds=like.launch_seconds,
        sending_share=like.sending_share,
        input_images_per_second=cores * _DECODED,
        price_per_gpu_hour=dollars / like.workers_per_node,
        watts_per_gpu=like.watts_per_gpu,
        sources=like.sources
        | {
            "network": source + latency,
            "price_per_gpu_hour": price,
            "input_images_per_second": f"{cores} cores [recalled M], 256-pixel packs, by "
            f"results/gpu",
            "watts_per_gpu": f"as {like.name}'s",
        },
    )


def _machines() -> dict[str, Machine]:
    own = {machine.name: machine for machine in _of_nvidia()}
    every = [*_of_the_papers(), *own.values(), *_of_clouds(own)]
    for machine in every:
        fitted = machine.fitted == "jitter"
        _on(machine, **({"jitter": "fitted on the 1,024-GPU row of Mikami 2018"} if fitted else {}))
    return {machine.name: machine for machine in every}


MACHINES = _machines()
