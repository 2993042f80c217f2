"""The byte floor: how fast tokens could come if LoRA cost nothing but reading its weights once."""

from __future__ import annotations

from lorahost.bench.shapes import Shape, adapter_matrices

BYTES = 2  # bf16
COPY_RATE = 4.3e12  # bytes a second, as measured on an H200


def touched(experts: int, draws: int) -> float:
    """Different experts among `draws` independent choices, on average."""
    return experts * (1 - (1 - 1 / experts) ** draws)


def lora_bytes(
    shape: Shape, layers: int, rank: int, targets: tuple[str, ...], adapters: int, concurrency: int
) -> float:
    """Bytes of LoRA weights that a decode step reads at least: of each adapter in it, each touched expert once.

    Args:
        shape: The model.
        layers: Its layers.
        rank: The adapters' rank.
        targets: What they are on.
        adapters: How many take turns.
        concurrency: Requests in a step, one token each.
    """
    busy = min(adapters, concurrency)
    total = 0.0
    for name, (rows, columns) in adapter_matrices(shape, 1, rank, targets).items():
        size = rows * columns * BYTES
        if ".experts." not in name:
            total += busy * size
            continue
        experts = shape.config.get("num_local_experts") or shape.config["num_experts"]
        draws = round(concurrency / busy * shape.config["num_experts_per_tok"])
        # stacked tensors hold all experts at once, the others one each
        share = touched(experts, draws) / experts
        total += busy * size * share
    return layers * total


def otps_limit(base_otps: float, read: float, copy_rate: float = COPY_RATE) -> float:
    """OTPS of a step that takes as long as without LoRA, and the time of reading `read` bytes."""
    return 1 / (1 / base_otps + read / copy_rate)
