"""How many adapters fit: bytes of one slot, and the numbers of slots and of adapters that memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorahost.adapters.layout import ModelLayout, Role
from lorahost.core import Json
from lorahost.environment import flag_value

DEVICE_SHARE = 0.2
HOST_SHARE = 0.5
BYTES_PER_WEIGHT = 2
# vLLM's own choice of ranks; adapters of smaller rank are padded
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was worked out, and from what.

    Attributes:
        slots: Adapters on the device at once.
        adapters: Adapters that the host can keep for the engine.
        slot_bytes: Device memory of one slot at the largest rank.
    """

    slots: int
    adapters: int
    slot_bytes: int
    device_free_bytes: int
    host_free_bytes: int

    def facts(self) -> Json:
        """For the log and `lorahost doctor`."""
        return {
            "slots": self.slots,
            "adapters": self.adapters,
            "slot_mb": round(self.slot_bytes / 2**20, 1),
            "device_free_mb": self.device_free_bytes >> 20,
            "host_free_mb": self.host_free_bytes >> 20,
        }


def slot_rank(tokens: Sequence[str], max_lora_rank: int) -> int:
    """The rank of a slot: vLLM's flag where it is set, else our setting, rounded up to what vLLM takes."""
    given = flag_value(tokens, "--max-lora-rank")
    if given is not None and given.isdecimal():
        return int(given)
    return next(rank for rank in ENGINE_RANKS if rank >= max_lora_rank)


def adapter_bytes(
    layout: ModelLayout,
    rank: int,
    bytes_per_weight: int = BYTES_PER_WEIGHT,
    wrapped: Callable[[str], bool] = lambda engine: True,
) -> int:
    """Bytes of one adapter on all `wrapped` modules of `layout`, padded to `rank` as the engine's slots are."""
    dense = [target for target in layout.dense_targets() if wrapped(target.engine)]
    weights: int = sum(rank * (t.in_features + t.out_features) for t in dense)
    for experts in (target for target in layout.expert_targets() if wrapped(target.engine)):
        roles: tuple[Role, ...] = ("gate_up", "down") if experts.form == "stacked" else ("gate", "up", "down")
        weights += experts.num_experts * rank * sum(sum(experts.features(role)) for role in roles)
    return weights * bytes_per_weight


def work_out(
    slot_bytes: int, *, device_free_bytes: int, host_free_bytes: int, max_slots: int, max_adapters: int
) -> Capacity:
    """Slots take at most a fifth of the device's free memory, host copies half of the host's."""
    slots = int(device_free_bytes * DEVICE_SHARE) // max(1, slot_bytes)
    adapters = int(host_free_bytes * HOST_SHARE) // max(1, slot_bytes)
    slots = max(1, min(slots, max_slots, max_adapters))
    return Capacity(slots, max(slots, min(adapters, max_adapters)), slot_bytes, device_free_bytes, host_free_bytes)


def host_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that the host can give, from /proc/meminfo."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable line")


def base_bytes(model_dir: Path) -> int:
    """Bytes of the base model's weight files; 0 if it is not a local directory."""
    return sum(f.stat().st_size for f in model_dir.glob("*.safetensors")) if model_dir.is_dir() else 0
