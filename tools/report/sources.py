"""Where the figures of a report come from: what each is, its formula in words, and the file that computes it."""

SOURCES = {
    "memory": {
        "name": "Memory of a rank",
        "formula": (
            "Weights, gradients and optimizer state that stay, plus the worst moment of the step's passes: the "
            "model is built and run on the meta device, every tensor is counted, and the Program says how many "
            "micro-batches are in flight. Then 5 % for fragmentation, the CUDA context and NCCL's "
            "communicators."
        ),
        "file": "megatron5d/planning/memory_forecast.py",
    },
    "step": {
        "name": "Time of a step",
        "formula": (
            "Every pass of every layer: GEMM FLOPs and bytes over the device's fitted share of its peak, "
            "attention, memory traffic, collectives over the slowest link of their group; the Program simulated "
            "with these times, and what data parallelism and the optimizer add at the end."
        ),
        "file": "megatron5d/planning/step_time.py",
    },
    "mfu": {
        "name": "MFU",
        "formula": (
            "FLOPs of the model for the tokens of a step (recomputation not counted) over the step's time, the "
            "number of ranks and the device's peak in 16 bits. The median error of predicted step times is 6 % "
            "on 71 published runs that were not fitted."
        ),
        "file": "megatron5d/model/flops.py",
    },
    "sent": {
        "name": "Bytes sent",
        "formula": (
            "The layer runs on the meta device with a ledger on every axis, which counts each collective: bytes "
            "that one rank sends in a ring."
        ),
        "file": "megatron5d/comm/ledger.py",
    },
    "bubble": {
        "name": "Bubble",
        "formula": ("(makespan − compute of the busiest rank) / makespan, in the simulation of the Program that runs."),
        "file": "megatron5d/pipeline_parallel/simulate.py",
    },
    "run": {
        "name": "A run's figure",
        "formula": ("As the run logged it, one JSON object a step."),
        "file": "megatron5d/train/monitoring/report.py",
    },
}
