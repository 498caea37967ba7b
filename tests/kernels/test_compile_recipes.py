"""What a job launches on each card compiles without a GPU and fits the card, with the tiles that the policy gives for it.

The second tier checks the launches of recipes of each kind on an H200 and compiles those of one; `-m cards` checks and compiles
all for all cards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.architectures import CARDS, MEASURED, card_for, usage_of
from tests.kernels.recipe_launches import NO_COMPILE, RECIPES, runs_on

ROOT, PROGRAM = Path(__file__).parents[2], Path(__file__).with_name("recipe_launches.py")
MOST_SPILLED = 640
"""Bytes of a thread's stack. On Hopper the kernels of all recipes take at most 48, on cards that multiply from registers more."""
COMPILED = "llama8b-fp8"
"""The recipe whose launches the second tier compiles: rounds of an EAGLE head, drawn tokens, products in FP8."""
CHECKED = ("llama8b-fp8-kv", "qwen3-30b-a3b-nvfp4", "gpt-oss-20b", "qwen3.5-35b-a3b")
"""The recipes whose launches the second tier checks: dense and with experts, FP8, four bits, MXFP4, recurrent layers, MTP."""
OF_DRAFT_LENGTHS = {"allocate_drafts_kernel", "learn_acceptance_kernel", "prepare_ragged_inputs_kernel"}
"""Kernels of rounds that verify more drafts of one row than of another."""


def recipes_on(architecture: int) -> list[str]:
    return [name for name in RECIPES if runs_on(name, card_for(architecture))]


def marks(always: bool) -> list[pytest.MarkDecorator]:
    """always: the second tier has the case."""
    return [pytest.mark.second if always else pytest.mark.slow, pytest.mark.cards]


ARCHITECTURES = [
    pytest.param(MEASURED, CHECKED, marks=pytest.mark.second, id=f"{CARDS[MEASURED]}, some"),
    *(
        pytest.param(architecture, recipes_on(architecture), marks=marks(False), id=card)
        for architecture, card in CARDS.items()
    ),
]
PAIRS = [
    pytest.param(architecture, name, marks=marks((architecture, name) == (MEASURED, COMPILED)), id=f"{name}, {card}")
    for architecture, card in CARDS.items() for name in recipes_on(architecture)
]


def checked(architecture: int, *words: str, cache: Path) -> dict[str, Any]:
    """The last line of recipe_launches.py, none of whose launches ended early."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), CARDS[architecture], *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *ended, last = (json.loads(line) for line in done.stdout.splitlines())
    assert {line["ended"] for line in ended} == set()
    return dict(last)


@pytest.mark.parametrize(("architecture", "names"), ARCHITECTURES)
def test_no_launch_of_any_recipe_ends_early(architecture: int, names: Sequence[str], tmp_path: Path) -> None:
    last = checked(architecture, NO_COMPILE, *names, cache=tmp_path)
    assert last["launches"] > 10 * len(names)
    assert last["compiled"] == 0


@pytest.mark.parametrize(("architecture", "name"), PAIRS)
def test_what_a_job_launches_compiles_and_fits(architecture: int, name: str, tmp_path: Path) -> None:
    last = checked(architecture, name, cache=tmp_path)
    card = card_for(architecture)
    used = [usage_of(json.loads(path.with_suffix(".json").read_text()), path) for path in tmp_path.glob("*/*.cubin")]
    assert len(used) == last["compiled"] > 20
    assert {usage.kernel for usage in used} >= OF_DRAFT_LENGTHS
    assert [misfit for usage in used if (misfit := usage.misfit(card))] == []
    assert [usage for usage in used if usage.spilled_bytes > MOST_SPILLED] == []
