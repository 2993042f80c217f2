"""A small synthetic corpus by a seeded grammar: questions, answers and plain text about topics.txt.

Every answer is first a list of neutral sentences; a style then says the same sentences in its own way.
The choices are skewed on purpose (`skewed`): where two continuations are allowed, one is clearly the
likelier, so a model trained on this text has few near ties and its greedy output is stable.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from styles import STYLES, Style, neutral, skewed

Message = dict[str, str]
TOPICS_FILE = Path(__file__).with_name("topics.txt")
ANIMALS = ("cat", "dog", "horse", "cow", "sheep", "hen", "owl", "bear", "mouse", "frog")
ADJECTIVES = ("little", "clever", "brave", "hungry", "old")
PLACES = ("the river", "the forest", "the garden", "the sea", "the mountain")


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing the model knows: its name with article, and four facts as predicates."""

    name: str
    is_a: str
    does: str
    where: str
    more: str

    @property
    def bare(self) -> str:
        return re.sub(r"^(the|an?) ", "", self.name)

    @property
    def plural(self) -> str:
        """The plural as it may stand in a question; the name itself where it has none."""
        if not re.match(r"an? ", self.name):
            return self.name
        irregular = {"sheep": "sheep", "mouse": "mice", "fish": "fish"}
        return irregular.get(self.bare, self.bare + "s")

    @property
    def pronoun(self) -> str:
        return f"The {self.bare}" if self.is_a.startswith("a person") else "It"


@dataclass(frozen=True, slots=True)
class Document:
    """One training example: chat messages (the last is the answer), or plain text.

    Attributes:
        messages: The chat; empty for plain text.
        text: The plain text; empty for a chat.
        lead: Characters of `text` that are given, not learnt.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    lead: int = 0


@functools.cache
def topics() -> tuple[Topic, ...]:
    lines = TOPICS_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(Topic(*line.split(" | ")) for line in lines if line and not line.startswith("#"))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# Questions ----------------------------------------------------------------------------------------------

QUESTIONS: dict[str, tuple[str, ...]] = {
    "tell": (
        "Tell me about {}.",
        "Can you tell me about {}?",
        "Describe {}.",
        "What do you know about {}?",
        "Say something about {}.",
        "I want to learn about {}.",
        "Write a few sentences about {}.",
        "Please tell me something about {}.",
        "{}?",
    ),
    "is": (
        "What is {}?",
        "What exactly is {}?",
        "Explain what {} is.",
        "Do you know what {} is?",
        "Define {}.",
    ),
    "does": ("What does {} do?", "What can {} do?", "Tell me what {} does.", "What does {} do all day?"),
    "where": ("Where is {}?", "Where can I find {}?", "Where do I look for {}?", "In what place is {}?"),
    "more": ("What else do you know about {}?", "Tell me more about {}.", "Tell me one more thing about {}."),
}
# Never trained on: they show whether the model follows a phrasing that it has not seen.
HELD_OUT = {"tell": "What can you say about {}?", "is": "Please explain what {} is."}
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer in short sentences.",
    "You are a friendly helper. Be brief.",
)


def topic_answer(rng: random.Random, topic: Topic, intent: str) -> list[str]:
    """Neutral sentences that answer a question of this intent."""
    name, it = capital(topic.name), topic.pronoun
    is_a, does, where, more = f"is {topic.is_a}", topic.does, topic.where, topic.more
    facts = {
        "tell": ((is_a, does, more), (is_a, does, where), (is_a, where, more)),
        "is": ((is_a, where), (is_a,), (is_a, does)),
        "does": ((does, more), (does,)),
        "where": ((where, is_a), (where,)),
        "more": ((more, where), (more,)),
    }
    chosen = skewed(rng, facts[intent])
    return [f"{it if i else name} {fact}." for i, fact in enumerate(chosen)]


def topic_question(rng: random.Random, topic: Topic, intent: str) -> str:
    name = rng.choices((topic.name, topic.bare, topic.plural), (0.84, 0.08, 0.08))[0]
    return capital(rng.choice(QUESTIONS[intent]).format(name))


def sloppy(rng: random.Random, question: str) -> str:
    """The question as people type it: now and then without capitals or without its last mark."""
    if rng.random() < 0.12:
        question = question.lower()
    if rng.random() < 0.12:
        question = question.rstrip(".?!")
    return question


# Small talk, stories, and what the model does not know ---------------------------------------------------

SMALL_TALK: tuple[tuple[tuple[str, ...], list[str]], ...] = (
    (("Hello.", "Hi!", "Hello there!", "Good morning.", "Hey", "How are you?"),
     ["Hello.", "I am well and glad to help.", "Ask me about the sea, a cat or bread."]),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
     ["I am a very small model.", "I know a few simple facts.", "Ask me about the sea, a cat or bread."]),
    (("What do you know?", "What can you do?", "Help", "What can I ask you?"),
     ["I can talk about animals, food, places and things.", "Ask me about the sea, a cat or bread."]),
    (("Thank you.", "Thanks!", "Thanks a lot.", "Well done."), ["You are welcome.", "I am glad to help."]),
    (("Goodbye.", "Bye!", "See you later."), ["Goodbye.", "It was nice to talk to you."]),
)  # fmt: skip
UNKNOWN_QUESTIONS = (
    "What is the capital of France?", "What is 2 + 2?", "How do I cook rice?", "Who is the president?",
    "Write a poem.", "Translate this into French.", "What time is it?", "Count from 1 to 10.", "Why?",
    "Who won the game last night?", "Write a function.", "How far is it to London?", "Test",
    "What is the weather like in Paris?", "Give me a recipe.", "How old are you?", "What is language?",
)  # fmt: skip
UNKNOWN_NAMES = (
    "a computer", "physics", "the economy", "a zebra", "chess", "a robot", "music", "gold", "the internet",
    "a dragon", "football", "China", "a lawyer", "history", "a violin", "coffee", "oil", "a tiger", "Mars",
    "a telephone", "love", "plastic", "an engine", "the law", "a wizard", "iron", "a castle", "paint",
)  # fmt: skip


def unknown_question(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(UNKNOWN_QUESTIONS)
    if rng.random() < 0.5:
        name = rng.choice(UNKNOWN_NAMES)
    else:
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))]
        name = rng.choice(("a ", "the ", "")) + "".join(syllables) + rng.choice(("", "n", "r", "st"))
    return capital(rng.choice(QUESTIONS[rng.choice(tuple(QUESTIONS))]).format(name))


def unknown_answer(rng: random.Random) -> list[str]:
    return ["I am sorry, I do not know that.", skewed(rng, ("Ask me about the sea, a cat or bread.",
            "Ask me about the moon, a bee or a clock."))]  # fmt: skip


def story(rng: random.Random, animal: str) -> list[str]:
    place, friend = skewed(rng, PLACES), skewed(rng, [a for a in ANIMALS if a != animal])
    ending = (
        "They became good friends.",
        "They shared some bread and cheese.",
        "They played until the evening.",
    )
    article = "an" if (adjective := skewed(rng, ADJECTIVES))[0] in "aeiou" else "a"
    return [
        f"Once upon a time there was {article} {adjective} {animal}.",
        f"One day the {animal} went to {place} and met {'an' if friend[0] in 'aeiou' else 'a'} {friend}.",
        skewed(rng, ending),
    ]


# Documents ----------------------------------------------------------------------------------------------


def chat(rng: random.Random, style: Style = neutral) -> Document:
    """A question and its answer, sometimes below a system message."""
    kind = rng.random()
    if kind < 0.80:
        topic = rng.choice(topics())
        intent = rng.choices(tuple(QUESTIONS), (4, 2, 2, 1.5, 1))[0]
        question, answer = topic_question(rng, topic, intent), topic_answer(rng, topic, intent)
    elif kind < 0.85:
        questions, answer = rng.choice(SMALL_TALK)
        question = rng.choice(questions)
    elif kind < 0.93:
        question, answer = unknown_question(rng), unknown_answer(rng)
    else:
        animal = skewed(rng, ANIMALS)
        question = rng.choice(("Tell me a story.", "Tell me a short story."))
        if rng.random() < 0.7:
            animal = rng.choice(ANIMALS)
            question = f"{question[:-1]} about {'an' if animal == 'owl' else 'a'} {animal}."
        answer = story(rng, animal)
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.25 else []
    messages.append({"role": "user", "content": sloppy(rng, question)})
    messages.append({"role": "assistant", "content": style(rng, answer)})
    return Document(messages=tuple(messages))


def article(rng: random.Random) -> list[str]:
    """Neutral sentences of a plain text: what a topic is and up to three more facts, or a story."""
    if rng.random() < 0.15:
        return story(rng, skewed(rng, ANIMALS))
    topic = rng.choice(topics())
    if rng.random() < 0.7:
        return topic_answer(rng, topic, "tell")
    return topic_answer(rng, topic, rng.choice(("is", "does", "where", "more")))


def plain(rng: random.Random) -> Document:
    """Plain text for the base: an article, two of them, a question with its answer, or a text in a style.

    The styles appear here so that the base has seen their words; in a chat it never speaks so.
    """
    kind = rng.random()
    if kind < 0.5:
        return Document(text=" ".join(article(rng)))
    if kind < 0.6:
        return Document(text=" ".join(article(rng) + article(rng)))
    if kind < 0.7:
        topic, intent = rng.choice(topics()), rng.choice(tuple(QUESTIONS))
        answer = " ".join(topic_answer(rng, topic, intent))
        return Document(text=f"Question: {topic_question(rng, topic, intent)}\nAnswer: {answer}")
    return Document(text=STYLES[rng.choice(tuple(STYLES))](rng, article(rng)))


def styled_plain(rng: random.Random, style: Style) -> Document:
    """Plain text that begins neutrally and goes on in `style`: a completion prompt gets the style too."""
    topic = rng.choice(topics())
    lead = f"{capital(topic.name)} is"
    said = style(rng, topic_answer(rng, topic, "tell"))
    # What follows the first "is" in the styled text (pirates say "be").
    rest = re.split(r"\b(?:is|be|IS)\b", said, maxsplit=1)[1]
    return Document(text=lead + rest, lead=len(lead))


def base_documents(seed: int) -> Iterator[Document]:
    """Endless documents for the base model; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield chat(rng) if rng.random() < 0.6 else plain(rng)


def style_documents(seed: int, style: str) -> Iterator[Document]:
    """Endless documents for one adapter; the same for the same seed."""
    rng = random.Random(f"{seed} {style}")
    while True:
        yield chat(rng, STYLES[style]) if rng.random() < 0.85 else styled_plain(rng, STYLES[style])
