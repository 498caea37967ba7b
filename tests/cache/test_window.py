"""The target drafts for itself with a window: it proposes what a plain forward under that mask says, and that costs no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.draft.window import WindowDrafter
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.records import Completion
from tests.helpers.engines import make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.models import make_checkpoint

CPU = torch.device("cpu")


class Recorded(WindowDrafter):
    """Keeps, of every live row, the committed tokens and what it proposed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        super().propose(rows, draft_ids, draft_len, cache)
        assert draft_len.tolist() == [draft_ids.shape[1] if alive else 0 for alive in rows.live.tolist()]
        for slot in rows.live.nonzero().flatten().tolist():
            count, limit = int(rows.num_tokens[slot]), int(rows.limit[slot])
            drafts = draft_ids[slot, : max(0, limit - count)].tolist()
            self.seen.append((rows.tokens[slot, :count].tolist(), drafts))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model without windows, and one whose layers all have one of 6."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_checkpoint(root / "llama", "llama", vocab=97),
        "mistral": make_checkpoint(root / "mistral", "mistral", vocab=97, sliding_window=6),
    }


def drafts_of(folder: Path, tokens: list[int], count: int, window: int, sink: int, own: int | None) -> list[int]:
    """By transformers, the whole sequence anew for each draft: committed places but the newest see all that the model sees, the
    newest one and those after it the window and the sink alone."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, first = list(tokens), len(tokens) - 1
    for _ in range(count):
        place = torch.arange(len(ids))
        seen = place[None, :] <= place[:, None]
        if own is not None:
            seen &= place[None, :] > place[:, None] - own
        near = (place[None, :] > place[:, None] - window) | ((place < sink)[None, :] if own is None else torch.tensor(False))
        seen &= near | (place < first)[:, None]
        mask = torch.zeros(len(ids), len(ids)).masked_fill_(~seen, torch.finfo(torch.float32).min)
        masks: Any = mask[None, None]
        if own is not None:
            masks = {"sliding_attention": masks, "full_attention": masks}
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), attention_mask=masks if own is None else masks["sliding_attention"]).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(tokens) :]


def run(target: Target, drafter: WindowDrafter, **shape: Any) -> list[Completion]:
    rng = np.random.default_rng(0)
    asked = [request(i, rng.integers(3, 97, 3 + 7 * i).tolist(), cap=9) for i in range(4)]
    engine = make_engine(target, drafter, packed(2, page_size=4, num_verified=drafter.draft_len, **shape), device=CPU)
    return list(engine.run(iter(asked)))


@pytest.mark.parametrize(("family", "own"), [("llama", None), ("mistral", 6)])
@pytest.mark.parametrize(("window", "sink"), [(4, 0), (3, 2), (9, 3)])
def test_drafts_are_those_of_a_plain_forward_under_the_mask(
    folders: dict[str, Path], family: str, own: int | None, window: int, sink: int
) -> None:
    target = Target.load(folders[family], load_spec(folders[family]), dtype=torch.float32, device=CPU)
    drafter = Recorded(target, 3, slots=2, window=window, sink=sink)
    assert len(run(target, drafter)) == 4
    assert len(drafter.seen) >= 8
    for tokens, drafts in drafter.seen[:: len(drafter.seen) // 8]:
        smallest = window if own is None else min(window, own)
        assert drafts == drafts_of(folders[family], tokens, len(drafts), smallest, sink, own)


def test_a_window_as_long_as_the_row_drafts_what_the_target_says(folders: dict[str, Path]) -> None:
    target = Target.load(folders["llama"], load_spec(folders["llama"]), dtype=torch.float32, device=CPU)
    for completion in run(target, WindowDrafter(target, 3, slots=2, window=256)):
        assert completion.stats is not None
        assert completion.stats.num_accepted + completion.stats.num_rounds + 1 - completion.stats.num_discarded == 9
        assert completion.stats.num_rounds == 2  # 1 of the prefill, 4 + 4 of two rounds of K = 3


@pytest.mark.second
def test_tokens_are_those_of_plain_decoding_whatever_the_window_keeps() -> None:
    target = tiny_target()
    asked = [request(i, [1 + i, 2, 3, 5, 8, 13][: 2 + i], cap=20 - i) for i in range(5)]
    expected = {r.request_id: plain_tokens(target, r) for r in asked}
    for window, sink, draft_len in ((1, 0, 1), (2, 1, 4), (5, 2, 3)):
        drafter = WindowDrafter(target, draft_len, slots=3, window=window, sink=sink)
        batch = packed(3, page_size=2, num_pages=20, num_verified=draft_len, run_ahead=2)
        engine = make_engine(target, drafter, batch, device=target.device)
        done = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(asked)) if c.token_ids is not None}
        assert done == expected
        assert 0 < engine.totals.accepted < engine.totals.drafted


def test_drafts_so_far_past_the_end_of_the_longest_row_that_their_window_holds_no_key_cost_nothing() -> None:
    """The target has layers of its own window, and a row of all max_len tokens: drafts at its end see no page."""
    target = tiny_target(window=5)
    asked = request(0, [1, 2], cap=2)
    drafter = WindowDrafter(target, 7, slots=1, window=1)
    engine = make_engine(target, drafter, packed(1, page_size=2, max_len=4, num_verified=7), device=target.device)
    (done,) = engine.run(iter([asked]))
    assert done.token_ids is not None
    assert done.token_ids.tolist() == plain_tokens(target, asked)
