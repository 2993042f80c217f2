"""The engine that tests of tuned configurations start: its GPUs and its model's config.json."""

from __future__ import annotations

from tests.kernels.tuned_files import GPU

from lorahost_kernels.tuned.start import Device

SHARED = 227 * 1024
H200 = Device(GPU, (9, 0), 132, SHARED)
A10 = Device("NVIDIA A10G", (8, 6), 80, 99 * 1024)
CONFIG = {
    "model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880, "head_dim": 64,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
    "vocab_size": 201088,
}  # fmt: skip
