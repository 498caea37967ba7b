"""The rows of a random job: prompts, images, limits, sampling, stop strings, constraints, adapters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import polars as pl

import batchspec
from tests.gpu_jobs.models import Model
from tests.helpers.image_models import picture
from tests.structured.test_grammar_jobs import SUMS, TREE, VALUES

Row = dict[str, Any]
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. In 2024 the city of Paris counted 2,102,650 people; "
    "the capital of France is Paris. Three rivers meet there, and seven bridges cross them: who walks over each of them once, "
    "and comes home again? def add(a, b): return a + b; print(add(1, 2)) Janet's ducks lay 16 eggs a day. She eats three for "
    "breakfast and bakes muffins with four. How many are left? Answer in one sentence, then list the steps: 1. 2. 3."
)
WORDS = TEXT.split()
PERSON = {
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    }, "required": ["name", "age"],
}
CONSTRAINTS: tuple[tuple[str, Any], ...] = (
    ("regex", "[0-9]{2,6}"), ("regex", "(yes|no|perhaps)( [a-z]{1,5}){0,4}"), ("regex", r"[A-Z][a-z ,]{3,30}\."),
    ("choice", ["yes", "no", "not at all"]), ("choice", ["12", "123", "1234567"]), ("schema", json.dumps(PERSON)),
    ("schema", json.dumps({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4})),
    ("schema", json.dumps(TREE)), ("grammar", SUMS), ("grammar", VALUES),
    ("response_format", json.dumps({"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}})),
    ("response_format", json.dumps({"type": "json_object"})),
)
STOPS = (".", " the", ", and", "\n\n", "e", "is", "1", "ing ", "?", "}")
COLUMNS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "n", "stop", "bad_words", "no_repeat_ngram", "schema", "regex", "choice",
    "grammar", "response_format", "adapter", "thinking_token_budget",
)


@cache
def demo_texts() -> list[str]:
    """The user turns of the package's demo."""
    frame = pl.read_parquet(Path(batchspec.__file__).parent / "conf/prompts/demo.parquet")
    found = [turns[-1]["content"] for turns in frame["messages"].to_list() if turns]
    return [text for text in found if text]


def words(rng: Random, chars: int) -> str:
    """Random words, at most `chars` characters; some are repeated, so that draft=lookup finds drafts."""
    found: list[str] = []
    while sum(map(len, found)) + len(found) < chars:
        at, length = rng.randrange(len(WORDS)), rng.randint(1, 9)
        piece = WORDS[at : at + length]
        found += piece * rng.choice([1, 1, 1, 2, 5])
    return " ".join(found)[: max(1, chars)]


def draw_rows(
    rng: Random, model: Model, *, kind: str, count: int, cap: int, longest: int, think: bool, adapters: int
) -> list[Row]:
    """Rows r0, r1, ... with all columns of COLUMNS, most of them null.

    kind      prompt, messages or prompt_ids
    cap       maximum number of output tokens of a row
    longest   length of the longest prompt, about, in tokens
    think     some rows have a thinking budget
    adapters  number of adapters that rows may name: a0, a1, ...
    """
    share = {name: rng.choice([0, 0.1, 0.4]) for name in COLUMNS} | {"max_new_tokens": 0.8, "adapter": 0.6}
    share["constraint"] = rng.choice([0, 0, 0.2, 0.6])
    per_token = 4 if model.is_smol else 2
    common = [words(rng, per_token * rng.choice([16, 70, min(600, longest // 2)])) for _ in range(2)]
    common_ids = [[rng.randrange(3, model.vocab) for _ in range(rng.choice([16, 70, min(600, longest // 2)]))] for _ in range(2)]
    rows: list[Row] = []
    for index in range(count):
        if rows and rng.random() < 0.1:
            prompt = rng.choice(rows)["prompt"]
        elif kind == "prompt_ids":
            prompt = [rng.randrange(3, model.vocab) for _ in range(_length(rng, longest))]
            prompt = (rng.choice(common_ids) + prompt)[:longest] if rng.random() < 0.4 else prompt
        else:
            own = rng.choice(demo_texts()) if rng.random() < 0.3 else words(rng, per_token * _length(rng, longest))
            prompt = (rng.choice(common) + own if rng.random() < 0.4 else own)[: per_token * longest]
        rows.append({"id": f"r{index}", "prompt": prompt, **_asks(rng, model, share, cap=cap, think=think, adapters=adapters)})
    for row in rows:
        prompt = row.pop("prompt")
        if model.reads_images:
            row["images"] = rng.choices(pictures(), k=rng.choice([0, 1, 1, 2, 3])) or None
            prompt = _with_marks(rng, prompt, len(row["images"] or ()))
        row[kind] = [{"role": "user", "content": prompt}] if kind == "messages" else prompt
    return rows


@cache
def pictures() -> list[bytes]:
    """Few, so that rows have some in common."""
    return [picture(height, width, seed) for seed, (height, width) in enumerate(((9, 8), (30, 50), (60, 20), (50, 70)))]


def _with_marks(rng: Random, prompt: str, count: int) -> str:
    """The prompt with as many images anywhere in it, often at its beginning."""
    for _ in range(count):
        at = rng.choice([0, rng.randint(0, len(prompt))])
        at = len(prompt) if prompt.startswith("<image>") and rng.random() < 0.3 else at
        while at and not (prompt[:at].endswith((" ", "<image>")) or at == len(prompt)):
            at -= 1  # never inside of another mark
        prompt = f"{prompt[:at]}<image>{prompt[at:]}"
    return prompt


def _length(rng: Random, longest: int) -> int:
    """Tokens of a prompt: most are short."""
    most = rng.choice([1, 5, 40, 40, 130, 300, longest])
    return rng.randint(1, min(most, longest))


def _asks(rng: Random, model: Model, share: dict[str, float], *, cap: int, think: bool, adapters: int) -> Row:
    """The columns of one row."""
    drawn = rng.random() < 0.5
    values: Row = {
        "max_new_tokens": rng.choice([rng.randint(1, 3), rng.randint(1, cap), rng.randint(1, cap), cap, cap]),
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.0, 1.6]) if drawn else 0.0,
        "top_p": rng.choice([0.3, 0.9, 0.95]), "top_k": rng.choice([1, 5, 40]), "min_p": rng.choice([0.02, 0.2]),
        "repetition_penalty": rng.choice([1.1, 1.5, 0.8]), "presence_penalty": rng.choice([0.6, -0.5, 2.0]),
        "frequency_penalty": rng.choice([0.3, 1.5, -0.3]), "logit_bias": _biases(rng, model), "seed": rng.randrange(1 << 40),
        "n": rng.randint(2, 4) if drawn else 1, "stop": rng.sample(STOPS, rng.randint(1, 3)),
        "bad_words": rng.sample((*STOPS, *WORDS), rng.randint(1, 6)),
        "no_repeat_ngram": json.dumps(
            {"ngram_size": rng.choice([1, 2, 3, 8]), "window_size": rng.choice([8, 30, 1000]), "whitelist_token_ids": [3, 11]}
        ),
        "thinking_token_budget": rng.choice([0, 1, 7, 30]) if think else None,
        "min_new_tokens": min(cap, rng.choice([1, 3, 8])),
        "adapter": f"a{rng.randrange(adapters)}" if adapters else None,
    }
    asked = {name: values.get(name) if rng.random() < share[name] else None for name in COLUMNS}
    asked["temperature"] = values["temperature"]
    if asked["min_new_tokens"] is not None and asked["max_new_tokens"] is not None:
        asked["min_new_tokens"] = min(asked["min_new_tokens"], asked["max_new_tokens"])
    if rng.random() < share["constraint"]:
        name, value = rng.choice(CONSTRAINTS)
        asked[name] = value
    return asked


def _biases(rng: Random, model: Model) -> str:
    """Column logit_bias: of some tokens, and of the EOS, so that rows end early or late."""
    found = {rng.randrange(model.vocab): rng.choice([-100, -5, 2.5, 8]) for _ in range(rng.randint(0, 6))}
    return json.dumps(found | {2: rng.choice([-100, 2, 5])})
