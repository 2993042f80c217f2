from __future__ import annotations

from pathlib import Path

import pytest

from lorahost import capacity
from lorahost.adapters.layout import ModelLayout

HIDDEN, INTERMEDIATE, EXPERTS, HEADS, KV_HEADS, HEAD, LAYERS, RANK = 64, 32, 8, 4, 2, 16, 2, 8
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_bytes_of_one_adapter_are_those_of_its_matrices() -> None:
    layout = ModelLayout.from_config(CONFIG)
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    attention = (HIDDEN + q) + 2 * (HIDDEN + kv) + (q + HIDDEN)
    expert = 2 * (HIDDEN + INTERMEDIATE) + (INTERMEDIATE + HIDDEN)
    others = [t for t in layout.dense_targets() if "self_attn" not in t.engine]
    rest = sum(t.in_features + t.out_features for t in others)
    weights = RANK * (LAYERS * (attention + EXPERTS * expert) + rest)
    assert capacity.adapter_bytes(layout, RANK) == 2 * weights
    assert capacity.adapter_bytes(layout, 2 * RANK, 4) == 8 * weights


def fits(**given: int) -> capacity.Capacity:
    usual = {"device_free_bytes": 1000, "host_free_bytes": 1000, "max_slots": 16, "max_adapters": 64}
    slot = given.pop("slot_bytes", 10)
    return capacity.work_out(slot, **{**usual, **given})


def test_slots_take_a_fifth_of_the_device_and_copies_half_of_the_host() -> None:
    found = fits(max_slots=1000, max_adapters=1000)
    assert (found.slots, found.adapters) == (20, 50)


@pytest.mark.parametrize(
    ("given", "slots", "adapters"),
    [
        ({"max_slots": 4}, 4, 50),
        ({"max_adapters": 3}, 3, 3),
        ({"device_free_bytes": 0}, 1, 50),
        ({"host_free_bytes": 0}, 16, 16),
        ({"slot_bytes": 10**9}, 1, 1),
        ({"slot_bytes": 0}, 16, 64),
    ],
)
def test_limits(given: dict[str, int], slots: int, adapters: int) -> None:
    found = fits(**given)
    assert (found.slots, found.adapters) == (slots, adapters)
    assert found.adapters >= found.slots >= 1


def test_facts_are_in_mebibytes() -> None:
    found = capacity.Capacity(2, 3, 3 << 19, 5 << 20, 7 << 20)
    assert found.facts() == {"slots": 2, "adapters": 3, "slot_mb": 1.5, "device_free_mb": 5, "host_free_mb": 7}


def test_free_memory_of_the_host(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   42 kB\n")
    assert capacity.host_free_bytes(meminfo) == 42 * 1024
    assert capacity.host_free_bytes() > 0
    meminfo.write_text("MemTotal:  100 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        capacity.host_free_bytes(meminfo)


def test_bytes_of_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "model-00001.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "model-00002.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 100)
    assert capacity.base_bytes(tmp_path) == 15
    assert capacity.base_bytes(tmp_path / "org" / "hub-id") == 0


@pytest.mark.parametrize(
    ("tokens", "setting", "rank"),
    [
        ((), 32, 32),
        ((), 9, 16),
        ((), 256, 256),
        (("--max-lora-rank", "64"), 32, 64),
        (("--max-lora-rank", "--enforce-eager"), 32, 32),
        (("--max-lora-rank",), 32, 32),
    ],
)
def test_the_rank_of_a_slot(tokens: tuple[str, ...], setting: int, rank: int) -> None:
    assert capacity.slot_rank(tokens, setting) == rank
