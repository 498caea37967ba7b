"""The target against transformers: logits, greedy tokens, taps; every family, every RoPE, sliding windows, dtypes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout, Tokens
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.errors import ConfigError
from batchspec.model.dtype import resolve_dtype
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.helpers.engines import VOCAB, tiny_target
from tests.helpers.models import causal_models, make_checkpoint
from tests.helpers.stand_ins import small_spec

PAGE_SIZE = 4
CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama biases, wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn, exact": ("llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.3}}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": 16,
        },
    ),
    "mistral window": ("mistral", {"sliding_window": 11}),
    "mistral": ("mistral", {"sliding_window": None}),
}


@dataclass
class Runner:
    """Feeds rows to a target through pages in shuffled order, any number of tokens of any rows a pass."""

    target: Target
    cache: KVCache
    page_table: Tensor
    num_ctx: list[int]

    @classmethod
    def start(cls, target: Target, num_rows: int, max_len: int = 128) -> Runner:
        spec, per_row = target.spec, max_len // PAGE_SIZE
        cache = KVCache.allocate(
            spec.layer_states(target.dtype, PAGE_SIZE, draft_len=7),
            groups=KVGroups.single(spec.num_paged_layers),
            page_size=PAGE_SIZE,
            num_pages=(num_rows * per_row + 1,),
            num_slots=num_rows,
            device=CPU,
        )
        pages = list(range(1, num_rows * per_row + 1))
        random.Random(0).shuffle(pages)
        return cls(target, cache, torch.tensor(pages, dtype=torch.int32).view(num_rows, per_row), [0] * num_rows)

    def feed(
        self, tokens: list[list[int]], taps: tuple[int, ...] = (), *, ends_only: bool = False, adapters: list[int] | None = None,
        known: Tokens = "prompt",
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The next tokens of each row (none: the row is dead in this pass) -> logits and taps of each row.

        adapters    of each row, for a target that has some
        known  what the tokens are; a row has at most 8 if they are drafts
        """
        lengths = [len(ids) for ids in tokens]
        row_ids = [r for r, n in enumerate(lengths) for _ in range(n)]
        positions = [self.num_ctx[r] + i for r, n in enumerate(lengths) for i in range(n)]
        pages = [int(self.page_table[r, p // PAGE_SIZE]) for r, p in zip(row_ids, positions, strict=True)]
        slots = [page * PAGE_SIZE + p % PAGE_SIZE for page, p in zip(pages, positions, strict=True)]
        self.num_ctx = [ctx + n for ctx, n in zip(self.num_ctx, lengths, strict=True)]
        kv_len = [ctx if n else 0 for ctx, n in zip(self.num_ctx, lengths, strict=True)]
        batch = FlatBatch(
            token_ids=torch.tensor([t for ids in tokens for t in ids], dtype=torch.int32),
            row_ids=torch.tensor(row_ids, dtype=torch.int32),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            page_table=self.page_table,
            max_q=max(lengths),
            max_kv=max(kv_len),
            host=HostLayout(lengths, kv_len),
            row_adapters=None if adapters is None else torch.tensor(adapters, dtype=torch.int32),
            tokens=known,
        )
        hidden, found = self.target.forward(batch, self.cache, taps, ends_only=ends_only)
        found = batch.token_ids[:, None][:, :0] if found is None else found
        return list(self.target.logits(hidden).split([1] * len(tokens) if ends_only else lengths)), list(found.split(lengths))


@pytest.mark.parametrize("taps", [(1, 1), (0, 99), (-1,)])
def test_a_tap_that_nothing_would_be_written_to_is_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be different boundaries in 0 \.\. 2"):
        Runner.start(tiny_target(), 1).feed(prompts([3], VOCAB), taps)


@pytest.mark.parametrize("taps", [(), (0, 1), (1, 2)])
def test_only_the_ends_of_rows_gives_their_logits_and_everything_that_later_passes_read(taps: tuple[int, ...]) -> None:
    """Of other places the last layer keeps K/V alone; a tap after the last layer asks for all of them."""
    ids = prompts([9, 1, 20], VOCAB)
    whole, ends = Runner.start(tiny_target(window=5), 3), Runner.start(tiny_target(window=5), 3)
    expected, expected_taps = whole.feed(ids, taps)
    found, found_taps = ends.feed(ids, taps, ends_only=True)
    for row in range(3):
        torch.testing.assert_close(found[row][0], expected[row][-1], atol=1e-12, rtol=0)
        torch.testing.assert_close(found_taps[row], expected_taps[row], atol=1e-12, rtol=0)
    torch.testing.assert_close(ends.cache.target_pages, whole.cache.target_pages, atol=1e-12, rtol=0)


def prompts(lengths: list[int], vocab: int = 320) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def oracle(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """transformers' model, in fp64 without its roundings to fp32, but for rotations, which are computed in fp32 here too."""
    model = causal_models().from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options).eval()
    if dtype is torch.float64:
        model.forward = _widened(model.forward)
    return model


def _widened(forward: Any) -> Any:
    narrow, softmax = torch.Tensor.float, torch.nn.functional.softmax

    @wraps(forward)
    def wide(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype is torch.float64 else narrow(x))
            patch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
            return forward(*args, **options)

    return wide


def greedy(model: Any, row: list[int], num_tokens: int) -> list[int]:
    """The row and its continuation. The mask says that a pad token within the prompt is a token like any other."""
    ids = torch.tensor([row])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    return list(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **settings)[0].tolist())


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    return Target.load(folder, load_spec(folder), dtype=dtype, device=CPU)


COVERED = ("llama linear", "llama yarn", "llama yarn, exact", "qwen2", "qwen3", "mistral")
"""Passes of every kind with -m slow alone: in a pass they differ from the other models by weights and frequencies."""


@pytest.mark.second
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in COVERED else ()) for name in MODELS])
def test_logits_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    assert_like_transformers(make_checkpoint(tmp_path, family, **config))


@pytest.mark.parametrize("name", COVERED)
def test_logits_of_a_row_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder, (ids,) = make_checkpoint(tmp_path, family, **config), prompts([100])
    with torch.inference_mode():
        expected = oracle(folder)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(load(folder), ids)[0], expected, atol=1e-4, rtol=0)


def assert_bf16_near_the_exact_logits(folder: Path, **options: Any) -> None:
    """As near as those of transformers, in prefill, and token by token. options: of from_pretrained"""
    (ids,) = prompts([40])
    models = [oracle(folder, dtype, **options) for dtype in (torch.float64, torch.bfloat16)]
    with torch.inference_mode():
        exact, theirs = (model(torch.tensor([ids])).logits[0].double() for model in models)
    runner = Runner.start(load(folder, torch.bfloat16), 1)
    parts = [runner.feed([ids[:23]])[0][0], *(runner.feed([[token]], known="drafts")[0][0] for token in ids[23:])]
    ours = torch.cat(parts).double()
    assert float((ours - exact).norm()) < 1.1 * float((theirs - exact).norm())


def assert_like_transformers(
    folder: Path, lengths: Sequence[int] = (37, 5, 22), *, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Logits within 1e-4 in fp32 and 1e-9 in fp64 of those in fp64, and 64 equal greedy tokens, in passes of every kind.

    lengths  of the three prompts
    options  of from_pretrained
    """
    model, rows = oracle(folder, dtype, **options), prompts([*lengths])
    expected = [greedy(model, row, 64) for row in rows]
    # Two programs in fp32 may each be within 1e-4 and differ by more, depending on the CPU.
    wide = model if dtype is torch.float64 else oracle(folder, torch.float64, **options)
    with torch.inference_mode():
        reference = [wide(torch.tensor([ids])).logits[0] for ids in expected]

    runner = Runner.start(load(folder, dtype), len(rows), max_len=-(-(max(lengths) + 64) // PAGE_SIZE) * PAGE_SIZE)
    # Prefill in uneven chunks, one row after the others, long and short ones in one pass.
    cut = lengths[0] * 20 // 37
    parts = [runner.feed([rows[0][:cut], rows[1], []])[0], runner.feed([rows[0][cut : cut + 3], [], rows[2][:1]])[0]]
    parts.append(runner.feed([rows[0][cut + 3 :], [], rows[2][1:]])[0])
    ids = [list(row) for row in rows]
    for _ in range(20):  # token by token
        for r in range(len(rows)):
            ids[r].append(int(parts[-1][r][-1].argmax()) if len(parts[-1][r]) else int(parts[0][r][-1].argmax()))
        parts.append(runner.feed([row[-1:] for row in ids], known="drafts")[0])
    for begin in range(20, 64, 4):  # several tokens a row, as a round verifies them; row 1 takes part in every other pass
        for r, row in enumerate(rows):
            ids[r] = expected[r][: len(row) + begin + 4]
        feed = [row[runner.num_ctx[r] :] if r != 1 or begin % 8 else [] for r, row in enumerate(ids)]
        parts.append(runner.feed(feed, known="drafts")[0])

    for r in range(len(rows)):
        logits = torch.cat([part[r] for part in parts])
        limit = 1e-9 if dtype is torch.float64 else 1e-4
        torch.testing.assert_close(logits.double(), reference[r][: len(logits)], atol=limit, rtol=0)
        assert logits[len(rows[r]) - 1 : -1].argmax(1).tolist() == expected[r][len(rows[r]) : len(logits)]
        assert len(logits) >= len(rows[r]) + 60


def run(target: Target, ids: list[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    logits, found = Runner.start(target, 1).feed([ids], taps)
    return logits[0], found[0]


def test_taps_are_the_residual_stream_at_the_boundaries(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab=64, num_hidden_layers=3)
    model, ids = oracle(folder), prompts([9], 64)[0]
    ends: list[Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: ends.append(output))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    _, taps = run(load(folder), ids, (0, 2, 3))
    # hidden_states[i] is what enters layer i; the last one is normed, so the hook gives what leaves the last layer.
    expected = torch.cat([states[0][0], states[2][0], ends[0].view(len(ids), -1)], -1)
    torch.testing.assert_close(taps, expected, atol=1e-4, rtol=0)


def test_taps_come_in_the_order_asked_for_and_change_no_logits(tmp_path: Path) -> None:
    target, ids = load(make_checkpoint(tmp_path, "qwen3", vocab=64)), prompts([9], 64)[0]
    logits, taps = run(target, ids, (3, 1))
    other, swapped = run(target, ids, (1, 3))
    size = target.spec.hidden_size
    assert torch.equal(logits, other)
    assert torch.equal(taps[:, :size], swapped[:, size:])
    assert torch.equal(taps[:, size:], swapped[:, :size])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 0.2)], ids=str)
def test_other_dtypes_follow_transformers_and_give_wide_logits(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, initializer_range=0.05)
    ids = prompts([40])[0]
    logits, _ = run(load(folder, dtype), ids)
    with torch.inference_mode():
        expected = oracle(folder, dtype)(torch.tensor([ids])).logits[0]
    assert logits.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(logits.double(), expected.double(), atol=tolerance, rtol=0)


def test_bf16_logits_are_not_rounded(tmp_path: Path) -> None:
    logits, _ = run(load(make_checkpoint(tmp_path, "llama"), torch.bfloat16), prompts([40])[0])
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_dummy_weights_need_only_the_config_and_are_the_same_every_time(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    spec, ids = load_spec(folder), prompts([12])[0]
    first, again = (run(Target.load(folder, spec, dtype=torch.float32, device=CPU, dummy=True), ids)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert first.isfinite().all()
    assert first.std() > 0


@pytest.mark.parametrize(
    ("name", "checkpoint", "fast", "expected"),
    [
        ("auto", "float32", True, torch.float32),
        ("auto", "float64", True, torch.float64),
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "float16", True, torch.float32),
    ],
)
def test_auto_is_the_checkpoints_dtype_unless_the_cpu_is_slow_in_it(
    name: str, checkpoint: str, fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype(name, small_spec(dtype=checkpoint), CPU) is expected


def test_auto_refuses_fp16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype=auto: the checkpoint is float16.*set bfloat16 or float32"):
        resolve_dtype("auto", small_spec(dtype="float16"), CPU)
