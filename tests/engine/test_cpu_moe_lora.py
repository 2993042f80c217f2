"""MoE LoRA on vLLM's CPU engine against Hugging Face and PEFT on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.families import PROMPTS, SPECS, Family, add, start, stop

pytestmark = pytest.mark.engine

MIXED = [
    (None, PROMPTS[0]),
    ("full", PROMPTS[0]),
    ("experts", PROMPTS[1]),
    (None, PROMPTS[2]),
    ("attention", PROMPTS[2]),
    ("full", PROMPTS[2]),
    ("experts", PROMPTS[0]),
    (None, PROMPTS[1]),
]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


class TestQwen3Moe:
    """Per-expert adapters, four slots, fp32."""

    @pytest.fixture(scope="class")
    @classmethod
    def family(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
        family = start("qwen3_moe", tmp_path_factory.mktemp("qwen3"), dtype=torch.float32, max_loras=4, tolerance=1e-3)
        yield family
        stop(family)

    def test_plugin_reports_itself(self, family: Family) -> None:
        report = family.rpc("lorahost_report")
        assert report["active"] is True
        assert report["vllm_version"].startswith("0.26.0")
        assert report["device"] == "cpu"
        assert report["operations"]["gate_up_shrink"] == "torch"
        assert "vllm.lora.layers.fused_moe:FusedMoEWithLoRA.__init__" in report["patches"]

    def test_base_alone(self, family: Family) -> None:
        family.check([(None, prompt) for prompt in PROMPTS])

    @pytest.mark.parametrize("adapter", [spec.name for spec in SPECS])
    def test_one_adapter(self, family: Family, adapter: str) -> None:
        family.check([(adapter, prompt) for prompt in PROMPTS])

    def test_mixed_batch(self, family: Family) -> None:
        family.check(MIXED)

    def test_adapters_change_the_output(self, family: Family) -> None:
        outputs = family.generate([(adapter, PROMPTS[1]) for adapter in (None, "full", "experts", "attention")])
        assert len({tuple(output.token_ids) for output in outputs}) == 4

    def test_wrapped_modules(self, family: Family) -> None:
        wrapped = set(family.rpc("lorahost_wrapped_modules"))
        for layer in range(2):
            prefix = f"model.layers.{layer}"
            assert {f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")} <= wrapped
            assert {f"{prefix}.mlp.experts.gate_up", f"{prefix}.mlp.experts.down"} <= wrapped
            assert f"{prefix}.self_attn.qkv_proj" not in wrapped

    def test_modules_of_a_loaded_adapter(self, family: Family) -> None:
        family.check([("attention", PROMPTS[0]), ("experts", PROMPTS[0])])
        attention = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "koqv"]
        experts = [f"model.layers.{i}.mlp.experts.{n}" for i in range(2) for n in ("down", "gate_up")]
        assert family.rpc("lorahost_adapter_modules", 3) == family.modules["attention"] == attention
        assert family.rpc("lorahost_adapter_modules", 2) == family.modules["experts"] == experts

    def test_zero_factors_are_not_counted(self, family: Family) -> None:
        path = rewritten(family, "full", "zeroed", zero_down_and_v)
        assert family.prepare(path, "zeroed", 20)["state"] == "ready"
        add(family, path, "zeroed", 20)
        expected = [f"model.layers.{i}.mlp.experts.gate_up" for i in range(2)]
        expected += [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "koq"]
        assert family.rpc("lorahost_adapter_modules", 20) == sorted(expected)
        family.engine.llm_engine.remove_lora(20)

    def test_prepared_adapter_serves_the_same(self, family: Family) -> None:
        path = family.directory / "adapters" / "full"
        answer = family.prepare(path, "again", 21)
        assert answer["state"] == "ready"
        assert answer["seconds"] > 0
        assert 21 not in family.engine.llm_engine.list_loras()
        request = add(family, path, "again", 21)
        family.requests["again"], family.references["again"] = request, family.references["full"]
        family.check([("again", prompt) for prompt in PROMPTS])
        assert family.engine.llm_engine.remove_lora(21)
        assert 21 not in family.engine.llm_engine.list_loras()
        with pytest.raises(Exception, match="engine_id 21 is not loaded"):
            family.rpc("lorahost_adapter_modules", 21)

    def test_discarded_preparation_is_gone(self, family: Family) -> None:
        path = family.directory / "adapters" / "full"
        family.prepare(path, "dropped", 22)
        assert family.rpc("lorahost_discard_prepared", 22) is True
        assert family.rpc("lorahost_discard_prepared", 22) is False
        with pytest.raises(Exception, match="engine_id 22 is not being prepared"):
            family.rpc("lorahost_prepare_poll", 22)

    @pytest.mark.parametrize("prepared", [True, False])
    def test_bad_adapter_leaves_nothing_behind(self, family: Family, prepared: bool) -> None:
        engine_id = 30 + prepared
        path = rewritten(family, "full", f"too-wide-{prepared}", widen_o_proj)
        if prepared:
            assert family.prepare(path, "bad", engine_id)["state"] == "ready"
        for _ in range(2):
            with pytest.raises(Exception, match="must match"):
                add(family, path, "bad", engine_id)
            assert engine_id not in family.engine.llm_engine.list_loras()
        family.check(MIXED)

    def test_unreadable_adapter_fails_in_the_background(self, family: Family) -> None:
        path = family.directory / "adapters" / "garbage"
        path.mkdir()
        (path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}')
        (path / "adapter_model.safetensors").write_bytes(b"not a tensor file")
        answer = family.prepare(path, "garbage", 32)
        assert answer["state"] == "failed"
        assert "SafetensorError" in answer["error"]
        with pytest.raises(Exception, match="header"):
            add(family, path, "garbage", 32)
        assert 32 not in family.engine.llm_engine.list_loras()
        family.check(MIXED[:2])


class TestMixtral:
    """One slot for three adapters, fp32: adapters take turns, and base rows share batches with each."""

    @pytest.fixture(scope="class")
    @classmethod
    def family(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
        family = start("mixtral", tmp_path_factory.mktemp("mixtral"), dtype=torch.float32, max_loras=1, tolerance=1e-3)
        yield family
        stop(family)

    def test_one_adapter_with_base_rows(self, family: Family) -> None:
        for adapter in ("full", "attention", "experts"):
            family.check([(None, PROMPTS[0]), (adapter, PROMPTS[0]), (None, PROMPTS[2]), (adapter, PROMPTS[2])])

    def test_more_adapters_than_slots(self, family: Family) -> None:
        family.check(MIXED)

    def test_modules_from_slot_and_from_host_copy(self, family: Family) -> None:
        family.check([("full", PROMPTS[0])])
        full = family.rpc("lorahost_adapter_modules", 1)
        assert "model.layers.1.block_sparse_moe.experts.down" in full
        family.check([("attention", PROMPTS[0])])
        assert family.rpc("lorahost_adapter_modules", 1) == full == family.modules["full"]


class TestGptOss:
    """3D adapters with interleaved gate and up rows, two slots, bf16."""

    @pytest.fixture(scope="class")
    @classmethod
    def family(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
        family = start("gpt_oss", tmp_path_factory.mktemp("gptoss"), dtype=torch.bfloat16, max_loras=2, tolerance=5e-2)
        yield family
        stop(family)

    def test_base_alone(self, family: Family) -> None:
        family.check([(None, prompt) for prompt in PROMPTS])

    def test_mixed_batch(self, family: Family) -> None:
        family.check(MIXED)

    def test_prepared_adapter_serves_the_same(self, family: Family) -> None:
        path = family.directory / "adapters" / "full"
        assert family.prepare(path, "again", 21)["state"] == "ready"
        family.requests["again"] = add(family, path, "again", 21)
        family.references["again"] = family.references["full"]
        family.check([("again", prompt) for prompt in PROMPTS])

    def test_modules_of_a_loaded_adapter(self, family: Family) -> None:
        family.generate([("experts", PROMPTS[0])])
        expected = [f"model.layers.{i}.mlp.experts.{n}" for i in range(2) for n in ("down", "gate_up")]
        assert family.rpc("lorahost_adapter_modules", 2) == family.modules["experts"] == expected
        family.generate([("full", PROMPTS[0])])
        assert family.rpc("lorahost_adapter_modules", 1) == family.modules["full"]


def rewritten(family: Family, adapter: str, name: str, change: Any) -> Path:
    """A copy of an adapter whose tensors went through `change`."""
    source, target = family.directory / "adapters" / adapter, family.directory / "adapters" / name
    target.mkdir()
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = {key: change(key, value) for key, value in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def zero_down_and_v(name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_down_b = ".down_proj.lora_B" in name
    is_v_a = ".v_proj.lora_A" in name
    return torch.zeros_like(tensor) if is_down_b or is_v_a else tensor


def widen_o_proj(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], dim=1) if ".1.self_attn.o_proj.lora_A" in name else tensor
