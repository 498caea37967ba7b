"""Drafts for rows with images of Gemma 4 change no token, whatever passes and pages are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.draft.assistant import AssistantDrafter
from batchspec.draft.none import NoDrafter
from batchspec.engine.slots import expected_pages
from tests.draft.test_image_drafts import drafter_named, tokens
from tests.engine.test_gemma4_images import BATCH, rows_of
from tests.helpers.assistants import make_assistant, opened
from tests.helpers.engines import DEVICE
from tests.helpers.image_models import image_engine, image_target, make_image_model

DOUBLE = torch.float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "gemma4", "gemma4", seed=3, dtype=DOUBLE)


@pytest.mark.second
@pytest.mark.parametrize("name", ["assistant", "eagle3", "parallel", "tree", "block", "pard"])
def test_tokens_are_those_without_drafts(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64; with few pages some rows are preempted, where images are decoded soon."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    target, drafter = image_target(folder, DOUBLE), None
    requests = rows_of(target, 30, predicted=2)
    expected = tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests)))
    if name == "assistant":
        _, found = opened(folder, make_assistant(tmp_path / "assistant", folder))
        drafter = AssistantDrafter(found.load(dtype=DOUBLE, device=DEVICE), target, 3, slots=3)
    for pages in (500, 80):
        own: Any = drafter or drafter_named(name, folder.parent, target, tmp_path / str(pages))
        engine = image_engine(target, own, replace(BATCH, num_pages=pages, prefill_tokens=75), kept_images=80)
        done = list(engine.run(requests))
        assert tokens(done) == expected
        assert sum(0 if one.stats is None else one.stats.num_drafted for one in done) > 50
