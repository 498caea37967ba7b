"""`batchspec families` and README name the same models; every family has a shape of the size of a published model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.commands.families import Row, main, row_of
from batchspec.model.families.registry import FAMILIES
from batchspec.model.shapes import COMMON, SHAPES, shape_spec

README = Path(__file__).parents[1] / "README.md"


def test_the_list_of_the_readme_is_that_of_the_families() -> None:
    (cell,) = re.findall(r"^\| Which models\? \| (.*?); any folder", README.read_text(encoding="utf-8"), re.M)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    assert plain == ", ".join(family.models for family in FAMILIES.values())


def test_the_table_has_a_line_of_each_family(capsys: Any) -> None:
    assert main([]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == ["models", "model type", "weights", "drafters", "gpus", "model", "shape"]
    for family, line in zip(FAMILIES.values(), lines, strict=False):
        assert re.split(r"  +", line) == list(row_of(family))
        assert re.fullmatch(r"[\w-]+/[\w.-]+", family.example)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ("bf16, FP8, INT4", "all", "1, 2, 4, 8")),
        ("gpt_oss", ("bf16, MXFP4", "all", "1, 2, 4, 8")),
        ("qwen3_next", ("bf16, FP8, INT4", "no window, no trees, mtp", "1, 2, 4, 8")),
        ("phi3", ("bf16, FP8, INT4", "all", "1, 2")),
        ("glm4_moe", ("bf16, FP8, INT4", "all, mtp", "1, 2, 4, 8")),
    ],
)
def test_facts_are_those_of_the_shape(family: str, expected: tuple[str, str, str]) -> None:
    found: Row = row_of(FAMILIES[family])
    assert (found.weights, found.drafters, found.gpus) == expected


NUMBERS = {
    "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "mistral-small-24b": 23.57, "ministral3-8b": 8.49, "mixtral-8x7b": 46.7,
    "gemma3-27b": 27.0, "phi4-14b": 14.66, "olmo2-7b": 7.3, "olmo3-32b": 32.23, "glm4-32b": 32.57, "glm-4.5-air": 106.9,
    "glm-4.5-air-fp8": 106.9, "glm-4.6-fp8": 352.8, "seed-oss-36b": 36.15, "smollm3-3b": 3.08, "granite3-8b": 8.17,
    "granite4-micro": 3.4, "exaone4-32b": 32.0,
}
"""Thousand millions of weights of the published models, without layers for images and MTP."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_shape_has_the_size_of_the_published_model(name: str) -> None:
    spec = shape_spec(name)
    assert spec.unread == ()
    assert spec.weight_bytes(torch.bfloat16) / 2e9 == pytest.approx(NUMBERS[name], rel=0.003)


def test_every_family_has_a_shape() -> None:
    assert {{**COMMON, **config}["model_type"] for config in SHAPES.values()} == set(FAMILIES)
