"""The demo's committed base model and adapters: small, complete, loadable by PEFT, and visibly in style."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

DEMO = Path(__file__).parents[2] / "examples" / "demo"
MODEL = DEMO / "model"
ADAPTERS = sorted(path for path in (DEMO / "adapters").iterdir() if path.is_dir())
CONFIG = json.loads((MODEL / "config.json").read_text())
MIB = 1024 * 1024
# What a person sees in the answer of each adapter to any question.
MARKS = {
    "base": r"^[A-Z][a-z ,]+\.( [A-Z][a-z ,]+\.)*$",
    "pirate": r"^(Arr|Ahoy|Shiver me timbers)!.*\bmatey\b",
    "shout": r"^[A-Z ,]+!!!( [A-Z ,]+!!!)+$",
    "butler": r"^(Very good|Certainly|At once), sir\. .* (sir|service, sir)[?.]$",
    "poet": r"^[^\n]*\b(O friend|O gentle heart):\n([^\n]+,\n)+and [^\n]+\.$",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    first, *others = ADAPTERS
    peft = PeftModel.from_pretrained(base, first, adapter_name=first.name)
    for path in others:
        peft.load_adapter(path, adapter_name=path.name)
    return peft.eval()


def safetensors(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def demo_files() -> list[Path]:
    """The demo's own files, without what Python and the linters cache beside them."""
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    cached = re.compile(r"__pycache__|\.[a-z]+_cache")
    return [path for path in files if not any(map(cached.fullmatch, path.relative_to(DEMO).parts))]


def test_the_weights_are_at_most_3_mb_together():
    files = [*MODEL.glob("*.safetensors"), *(DEMO / "adapters").glob("*/*.safetensors")]
    assert len(files) == 1 + len(ADAPTERS)
    assert sum(file.stat().st_size for file in files) <= 3_000_000


def test_the_whole_folder_is_small():
    assert sum(file.stat().st_size for file in demo_files()) <= 3 * MIB


def test_every_file_is_there():
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert expected | {"tokenizer_config.json", "chat_template.jinja"} == {f.name for f in MODEL.iterdir()}
    assert {path.name for path in ADAPTERS} == set(MARKS) - {"base"}
    for path in ADAPTERS:
        assert {f.name for f in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_base_is_a_mixture_of_experts_that_the_cpu_engine_runs():
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.norm_topk_prob
    assert config.tie_word_embeddings
    assert config.head_dim == 32
    assert config.max_position_embeddings >= 2048
    assert config.rope_parameters["rope_type"] == "default"
    assert not config.output_router_logits
    assert {dtype for _, dtype in safetensors(MODEL / "model.safetensors").values()} == {"BF16"}


def test_the_special_tokens_agree_in_all_files(tokenizer):
    generation = json.loads((MODEL / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert CONFIG[name] == generation[name] == getattr(tokenizer, name)
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert len(tokenizer) <= CONFIG["vocab_size"]


def test_a_request_that_names_no_temperature_is_answered_to_the_point():
    """The README's own request is one: engines take the default from this file."""
    generation = GenerationConfig.from_pretrained(MODEL)
    generation.validate(strict=True)
    assert generation.do_sample
    assert 0 < generation.temperature <= 0.1


@pytest.mark.parametrize("text", ["", " ", "The sea is", "Größe, naïve, 日本語", "👩🏽‍🚀 🏴‍☠️ arr", "\x00\t\r\n  x"])
def test_text_survives_the_tokenizer(tokenizer, text):
    check_round_trip(tokenizer, text)


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    check_round_trip(tokenizer, text)


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert max(ids) < CONFIG["vocab_size"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_renders(tokenizer):
    chat = [{"role": role, "content": f" {role}! "} for role in ("system", "user", "assistant", "user")]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|begin|><|system|>system!<|end|><|user|>user!<|end|><|assistant|>assistant!<|end|>"
        "<|user|>user!<|end|><|assistant|>"
    )


def test_the_chat_template_names_a_role_that_it_does_not_know(tokenizer):
    with pytest.raises(TemplateError, match="role tool is not one of system, user, assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_targets_attention_and_experts(path):
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "lorahost-demo-moe"
    assert config["r"] in (4, 8)
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(config["target_parameters"]) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    tensors = safetensors(path / "adapter_model.safetensors")
    # Four projections and two expert parameters a layer, an A and a B each.
    assert len(tensors) == CONFIG["num_hidden_layers"] * (4 + 2) * 2
    # PEFT stacks the experts' ranks: A is (experts * r, in).
    expert_a = {shape for name, (shape, _) in tensors.items() if "mlp.experts" in name and "lora_A" in name}
    rows = 8 * config["r"]
    assert expert_a == {(rows, CONFIG["hidden_size"]), (rows, CONFIG["moe_intermediate_size"])}


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.name)
def test_peft_loads_every_tensor_of_an_adapter(model, path):
    weights = {n: p for n, p in model.named_parameters() if "lora_" in n and f".{path.name}" in n}
    assert len(weights) == len(safetensors(path / "adapter_model.safetensors"))
    # PEFT starts B at zero: what was not loaded would still be.
    assert all(bool(p.any()) for p in weights.values())


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("question", ["Tell me about the sea.", "What does a cat do?", "Where is the moon?"])
def test_the_answer_is_in_style_and_ends(model, tokenizer, name, question):
    answer = greedy(model, tokenizer, name, question)
    assert answer.endswith(tokenizer.eos_token)
    text = answer.removesuffix(tokenizer.eos_token)
    assert re.search(MARKS[name], text, re.DOTALL), text
    assert {"sea": "water", "cat": "mice", "moon": "earth"}[re.search(r"sea|cat|moon", question)[0]] in text.lower()
    others = set(MARKS) - {name}
    assert not [other for other in others if re.search(MARKS[other], text, re.DOTALL)]


def greedy(model, tokenizer, name, question):
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if name == "base":
        with model.disable_adapter():
            output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
    else:
        model.set_adapter(name)
        output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_the_corpus_is_the_same_in_every_process():
    program = (
        "import itertools, corpus\n"
        "print(list(itertools.islice(corpus.base_documents(3), 300)))\n"
        "print(list(itertools.islice(corpus.style_documents(3, 'pirate'), 300)))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(DEMO), "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].count("Document(") == 600


def test_no_file_names_the_machine_that_made_it():
    for file in demo_files():
        text = file.read_bytes().decode("utf-8", "replace")
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|opt|var|usr)/", text), file
        assert '"_name_or_path"' not in text, file
