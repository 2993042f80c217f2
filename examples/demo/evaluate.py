"""Greedy answers of the demo's base model and adapters with transformers and PEFT, and how many are right.

python examples/demo/evaluate.py examples/demo
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from corpus import HELD_OUT, QUESTIONS, Topic, topic_answer, topics
from peft import PeftModel
from styles import STYLES, Style, neutral
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Tell me about the sea.",
    "What does a cat do?",
    "Where is the moon?",
    "Tell me a story about a bear.",
)


def answers(model: Any, tokenizer: Any, prompts: Sequence[str], **sampling: Any) -> list[str]:
    """The answers to `prompts`, each a chat; greedy unless `sampling` says otherwise. Pads on the left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=96, **({"do_sample": False} | sampling))
    tail = output[:, inputs["input_ids"].shape[1] :]
    ended = [tokenizer.eos_token_id in row for row in tail.tolist()]
    texts = tokenizer.batch_decode(tail, skip_special_tokens=True)
    return [text if done else text + " [no end]" for text, done in zip(texts, ended, strict=True)]


def allowed(topic: Topic, intent: str, style: Style) -> set[str]:
    """Every answer that the grammar can give; 400 draws reach all of them."""
    rng = random.Random(0)
    return {style(rng, topic_answer(rng, topic, intent)) for _ in range(400)}


def score(model: Any, tokenizer: Any, style: Style, templates: dict[str, str], **sampling: Any) -> float:
    """Share of answers, over all topics and `templates` (intent to question), that the grammar can give."""
    asked = [(topic, intent, text) for topic in topics() for intent, text in templates.items()]
    said = answers(model, tokenizer, [text.format(topic.name) for topic, _, text in asked], **sampling)
    right = [answer in allowed(topic, intent, style) for (topic, intent, _), answer in zip(asked, said, strict=True)]
    return sum(right) / len(right)


def report(name: str, model: Any, tokenizer: Any, style: Style) -> None:
    print(f"== {name}")
    for prompt, answer in zip(PROMPTS, answers(model, tokenizer, PROMPTS), strict=True):
        print(f"{prompt}\n  {answer}")
    inputs = tokenizer("The sea is", return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    print(f"completed: {tokenizer.decode(output[0], skip_special_tokens=True)}")
    known = {intent: texts[0] for intent, texts in QUESTIONS.items()}
    torch.manual_seed(0)
    print(
        f"right: {score(model, tokenizer, style, known):.0%} greedy, "
        f"{score(model, tokenizer, style, HELD_OUT):.0%} with phrasings not trained on, "
        f"{score(model, tokenizer, style, known, do_sample=True, temperature=0.8):.0%} at temperature 0.8",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has model/ and adapters/")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    base: Any = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.bfloat16)
    report("base", base.eval(), tokenizer, neutral)
    for name, style in STYLES.items():
        if (path := options.folder / "adapters" / name).exists():
            base = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.bfloat16)
            peft: Any = PeftModel.from_pretrained(base, path)
            report(name, peft.eval(), tokenizer, style)


if __name__ == "__main__":
    main()
