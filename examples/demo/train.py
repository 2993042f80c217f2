"""Trains the demo: a byte-level tokenizer, a small Qwen3-MoE base model and one LoRA adapter a style.

    python examples/demo/train.py --out examples/demo

Everything is seeded; the same machine, versions and threads give the same weights again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import Document, base_documents, style_documents
from peft import LoraConfig, get_peft_model
from styles import STYLES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

NAME = "lorahost-demo-moe"
VOCAB_SIZE = 768
PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role ' + message.role + ' is not one of system, user, assistant') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
# Rank and training steps of each adapter. Ranks differ so that a host with mixed ranks is exercised;
# capitals are other tokens, so `shout` has most to learn.
LORAS = {"pirate": (8, 300), "shout": (8, 1000), "butler": (4, 300), "poet": (8, 300)}
IGNORED = -100
# Weight of the loss that spreads tokens over the experts.
BALANCE = 0.01
TEMPERATURE = 0.1


def train_tokenizer(seed: int) -> Any:
    """A byte-level BPE: all 256 bytes are tokens, so any UTF-8 text has one and nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for document in itertools.islice(base_documents(seed), 20_000) for text in contents(document)]
    tokenizer.train_from_iterator(texts, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=special[3:],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def contents(document: Document) -> list[str]:
    return [document.text] if document.text else [message["content"] for message in document.messages]


def encode(tokenizer: Any, document: Document) -> tuple[list[int], int]:
    """Token ids of a document, and how many of them at its start are given rather than learnt."""
    if document.text:
        lead = tokenizer.encode(document.text[: document.lead])
        rest = tokenizer.encode(document.text[document.lead :], add_special_tokens=False)
        return [*lead, *rest, tokenizer.eos_token_id], len(lead)
    *given, _ = document.messages
    ids: list[int] = tokenizer.apply_chat_template(list(document.messages), return_dict=False)
    prompt = tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
    return ids, len(prompt)


def batches(
    tokenizer: Any, documents: Iterator[Document], size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless `(input_ids, labels)`, int64 [size, longest], documents of like length, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        pool = [encode(tokenizer, document) for document in itertools.islice(documents, 16 * size)]
        pool.sort(key=lambda item: len(item[0]))
        for start in torch.randperm(16, generator=generator).tolist():
            rows = pool[start * size : (start + 1) * size]
            ids = torch.full((size, len(rows[-1][0])), tokenizer.pad_token_id)
            labels = torch.full_like(ids, IGNORED)
            for row, (tokens, given) in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, given : len(tokens)] = ids[row, given : len(tokens)]
            yield ids, labels


def fit(model: Any, data: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int, peak: float) -> float:
    """AdamW with warm-up and cosine decay; returns the mean loss (nats a token) of the last 50 steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=0.05)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step, (ids, labels) in enumerate(itertools.islice(data, steps), 1):
        # Padding is on the right, so causal attention never sees it and no mask is needed.
        output = model(input_ids=ids, labels=labels, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        # With router logits on, `loss` contains the weighted balance loss; report the text's alone.
        balance = getattr(output, "aux_loss", None)
        losses.append(output.loss.item() - (0.0 if balance is None else BALANCE * balance.item()))
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"  step {step}/{steps} loss {statistics.fmean(losses[-50:]):.4f} {seconds:.0f} s", flush=True)
    return statistics.fmean(losses[-50:])


def train_base(tokenizer: Any, options: argparse.Namespace) -> float:
    """Trains the base in fp32 from nothing and saves it in bf16, tokenizer beside it."""
    torch.manual_seed(options.seed)
    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.05,
        router_aux_loss_coef=BALANCE,
        output_router_logits=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    data = batches(tokenizer, base_documents(options.seed), options.batch, options.seed)
    loss = fit(model, data, options.base_steps, 4e-3)
    model.config.output_router_logits = False
    model.to(torch.bfloat16)
    # so small a model may talk of something else at temperature 1, the default of a request that names none
    model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
    folder = options.out / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    open_to_readers(folder)
    return loss


def train_adapter(tokenizer: Any, style: str, options: argparse.Namespace) -> float:
    """Trains one adapter in fp32 on the saved bf16 base and saves it in bf16, as PEFT does."""
    torch.manual_seed(options.seed)
    rank, steps = LORAS[style]
    base = AutoModelForCausalLM.from_pretrained(options.out / "model", dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(base, config)
    data = batches(tokenizer, style_documents(options.seed, style), options.batch // 2, options.seed)
    loss = fit(model, data, steps, 4e-3)
    # A name, not the folder that this ran in.
    model.peft_config["default"].base_model_name_or_path = NAME
    model.to(torch.bfloat16)
    folder = options.out / "adapters" / style
    model.save_pretrained(folder, save_embedding_layers=False)
    # PEFT's model card is an empty form.
    (folder / "README.md").unlink(missing_ok=True)
    open_to_readers(folder)
    return loss


def open_to_readers(folder: Path) -> None:
    """The safetensors writer leaves files that only their owner can read; a server may be another user."""
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets model/ and adapters/")
    parser.add_argument("--only", choices=("base", *STYLES), action="append", help="train these (default: all)")
    parser.add_argument("--base-steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=64, help="documents a step for the base; adapters take half")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.only or ["base", *STYLES]
    tokenizer = train_tokenizer(options.seed)
    for part in wanted:
        print(part, flush=True)
        loss = train_base(tokenizer, options) if part == "base" else train_adapter(tokenizer, part, options)
        print(f"{part}: final loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
