"""sample: draws from softmax(logits / temperature) over the kept ids, fixed by row key, position and id alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.sampling.argmax import NO_TOKEN, argmax
from batchspec.kernels.sampling.counter_rng import (
    mix32,
    mix32_reference,
    mix64_reference,
    position_words,
    position_words_reference,
    uniform,
    uniform_reference,
)
from batchspec.kernels.sampling.sample import BLOCK, gumbel, gumbel_reference, sample, sample_part, words_reference
from tests.kernels.covering import covering

POISON = -7
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT64 = st.integers(-(2**63), 2**63 - 1)


def draw(
    logits: Tensor, interpret: bool, *, temperature: float | Tensor = 1.0, cutoff: float | Tensor = -INF, **inputs: Tensor
) -> Tensor:
    """Draws for T flat tokens; by default each is a row of its own with key t, at position 100."""
    device, num_tokens = logits.device, len(logits)
    row_ids = inputs.get("row_ids", torch.arange(num_tokens, dtype=torch.int32, device=device))
    keys = inputs.get("keys", torch.arange(num_tokens, device=device))
    positions = inputs.get("positions", torch.full((num_tokens,), 100, device=device))
    wide = logits.dtype == torch.float64
    temp = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(len(keys)).contiguous()
    low = torch.as_tensor(cutoff, dtype=torch.float64 if wide else torch.float32, device=device).expand(num_tokens).contiguous()
    out_ids = torch.full((num_tokens,), POISON, dtype=torch.int32, device=device)
    sample(logits, row_ids, positions, keys, temp, low, out_ids=out_ids, interpret=interpret)
    return out_ids


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """Statistic per degree of freedom, as a normal deviate (Wilson-Hilferty)."""
    counts = torch.bincount(ids.cpu().long(), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    used = expected > 0
    assert counts[~used].sum() == 0
    freedom = int(used.sum()) - 1
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    spread = 2 / (9 * freedom)
    return (math.pow(statistic / freedom, 1 / 3) - (1 - spread)) / math.sqrt(spread)


# the noise


@triton.jit
def noise_kernel(keys, positions, ids, out_words, out_noise, out_uniform, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word0, word1 = position_words(tl.load(keys + lane), tl.load(positions + lane))
    h = mix32(mix32(tl.load(ids + lane).to(tl.uint32, bitcast=True) + word0) ^ word1)
    tl.store(out_words + lane, h.to(tl.int32, bitcast=True))
    tl.store(out_noise + lane, gumbel(h))
    tl.store(out_uniform + lane, uniform(word0, word1))


@triton.jit
def gumbel_kernel(words, out_noise, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_noise + lane, gumbel(tl.load(words + lane).to(tl.uint32, bitcast=True)))


def test_mixing_gives_the_published_values() -> None:
    golden = 0x9E3779B97F4A7C15
    first = int(mix64_reference(torch.tensor([golden - 2**64])))
    assert first % 2**64 == 0xE220A8397B1DCDAF  # splitmix64's first output for seed 0

    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    words = torch.randint(-(2**31), 2**31, (200,), dtype=torch.int32)
    expected = [lowbias32(int(word) % 2**32) for word in words]
    assert [int(h) % 2**32 for h in mix32_reference(words.clone())] == expected


@settings(max_examples=10)
@given(triples=st.lists(st.tuples(INT64, st.integers(0, 2**40), st.integers(0, 2**31 - 1)), min_size=64, max_size=64))
def test_words_of_kernel_and_reference_are_equal_integers(triples: list[tuple[int, int, int]], device: torch.device) -> None:
    keys, positions = torch.tensor([triple[:2] for triple in triples], device=device).unbind(1)
    ids = torch.tensor([triple[2] for triple in triples], dtype=torch.int32, device=device)
    words, noise, uniforms = torch.empty_like(ids), torch.empty(64, device=device), torch.empty(64, device=device)
    noise_kernel[(1,)](keys.contiguous(), positions.contiguous(), ids, words, noise, uniforms, BLOCK=64)
    assert words.tolist() == words_reference(*position_words_reference(keys, positions), ids).tolist()
    assert uniforms.tolist() == uniform_reference(keys, positions).tolist()
    assert bool(((uniforms >= 0) & (uniforms < 1)).all())


def test_noise_is_exact_where_it_is_large_and_finite_everywhere(device: torch.device) -> None:
    special = [0, 1, 2, 3, 2**16, 2**27, 2**28 - 1, 2**28, 2**28 + 1, 2**31 - 1, 2**31, 2**32 - 300, 2**32 - 2, 2**32 - 1]
    unsigned = torch.cat([torch.tensor(special), torch.logspace(0, 32, 1024 - len(special), 2, dtype=torch.float64).long() - 1])
    words = torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32).to(device)
    noise = torch.empty(1024, device=device)
    gumbel_kernel[(1,)](words, noise, BLOCK=1024)
    v = ((unsigned.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exact = -torch.log(-torch.log1p(-v))
    kept = v < 0.5  # above, v itself is rounded
    assert torch.isfinite(noise).all()
    assert float((noise.cpu().double() - exact)[kept].abs().max()) < 3e-6
    assert float((noise.cpu().double() - exact)[~kept].abs().max()) < 0.3
    assert noise.min() > -2.9
    assert 22.8 < float(noise.max()) < 22.9


def test_reference_noise_has_the_gumbel_moments_and_no_neighbours(device: torch.device) -> None:
    keys = torch.arange(40, device=device)
    noise = torch.stack([gumbel_reference(keys, torch.full_like(keys, position), 1000) for position in range(5)]).double()
    assert noise.shape == (5, 40, 1000)
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.015)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    scaled = (noise - noise.mean()) / noise.std()
    for near in ((scaled[1:] * scaled[:-1]), scaled[:, 1:] * scaled[:, :-1], scaled[..., 1:] * scaled[..., :-1]):
        assert abs(float(near.mean())) < 5 / math.sqrt(near.numel())


# the draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 33])
def test_largest_sum_of_logit_and_noise(vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = (torch.randn(4, vocab, device=device) * 3).to(dtype)
    keys = torch.tensor([5, -1, 2**63 - 1, -(2**63)], device=device)
    positions = torch.tensor([0, 1, 8191, 2**33], device=device)
    temp = torch.tensor([0.3, 1.0, 2.0, 0.7], device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums = logits.to(wide) / temp[:, None].to(wide) + gumbel_reference(keys, positions, vocab)
    assert draw(logits, interpret, temperature=temp, keys=keys, positions=positions).tolist() == sums.argmax(1).tolist()


INTERPRETED = pytest.mark.parametrize("interpreted", [60, pytest.param(300, marks=pytest.mark.slow)])
"""Draws where the interpreter makes them; the reference makes 40,000, and the kernel is compared with it draw by draw above."""


@INTERPRETED
@pytest.mark.parametrize(("keyed_by", "temperature"), [("position", 1.0), ("key", 0.5), ("key", 3.0)])
def test_draws_follow_the_softmax(
    keyed_by: str, temperature: float, interpreted: int, interpret: bool, device: torch.device
) -> None:
    num_tokens = interpreted if interpret and device.type == "cpu" else 40000
    row = torch.tensor([0.0, 1.0, -1.0, 1.5, 0.5, -0.5, 0.8], device=device)
    count, same = torch.arange(num_tokens, device=device), torch.zeros(num_tokens, dtype=torch.int64, device=device)
    keys, positions = (same + 77, count) if keyed_by == "position" else (count, same + 512)
    ids = draw(row.expand(num_tokens, -1), interpret, temperature=temperature, keys=keys, positions=positions)
    assert chi_square(ids, torch.softmax(row / temperature, 0).cpu()) < 4


@INTERPRETED
def test_draws_below_the_cutoff_follow_the_softmax_of_what_is_kept(
    interpreted: int, interpret: bool, device: torch.device
) -> None:
    num_tokens = interpreted if interpret and device.type == "cpu" else 40000
    row = torch.tensor([0.0, 1.0, -1.0, 1.5, 0.5, -0.5, 0.8], device=device)
    ids = draw(row.expand(num_tokens, -1), interpret, cutoff=0.5)
    assert chi_square(ids, torch.softmax(torch.where(row >= 0.5, row, -INF), 0).cpu()) < 4


def test_a_row_with_one_kept_id_draws_it(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(20, 50, device=device)
    top = logits.max(1)
    assert draw(logits, interpret, cutoff=top.values, temperature=5.0).tolist() == top.indices.tolist()


def test_few_contenders_in_a_large_vocabulary_draw_as_the_full_sum(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(6, 5000, device=device) * 8
    keys, positions = torch.arange(6, device=device), torch.full((6,), 100, device=device)
    for temp in (0.05, 0.4, 20.0):
        expected = (logits / temp + gumbel_reference(keys, positions, 5000)).argmax(1)
        assert draw(logits, interpret, temperature=temp).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_zero_is_argmax(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(5, 700, device=device).to(dtype)
    logits[1, :600] = NAN
    logits[2] = -INF
    logits[3, [9, 400]] = 50
    logits[4] = NAN
    expected = torch.full((5,), POISON, dtype=torch.int32, device=device)
    argmax(logits, out_ids=expected, flag_nonfinite=True)
    assert expected[1:].tolist() == [NO_TOKEN, NO_TOKEN, 9, NO_TOKEN]
    assert draw(logits, interpret, temperature=0.0).tolist() == expected.tolist()
    assert draw(logits, interpret, temperature=0.0, cutoff=1e4).tolist() == expected.tolist()


def test_greedy_and_sampled_rows_share_a_batch(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(8, 300, device=device)
    temp = torch.tensor([0.0, 1.0] * 4, device=device)
    mixed = draw(logits, interpret, temperature=temp)
    assert mixed[::2].tolist() == draw(logits, interpret, temperature=0.0)[::2].tolist()
    assert mixed[1::2].tolist() == draw(logits, interpret, temperature=1.0)[1::2].tolist()


@pytest.mark.parametrize(("at", "dtype"), covering([0, 40, BLOCK, 2 * BLOCK + 6], DTYPES, one_in=4))
def test_logits_that_are_not_finite_give_no_token_and_leave_other_rows_alone(
    at: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    logits = torch.randn(6, 2 * BLOCK + 7, device=device).to(dtype)
    healthy = draw(logits, interpret).tolist()
    logits[1, at], logits[3, at] = NAN, INF
    logits[4] = -INF
    logits[5, torch.arange(logits.shape[1], device=device) != at] = -INF  # masks leave one id
    for low in (-INF, 0.5, NAN):
        found = draw(logits, interpret, cutoff=torch.tensor([-INF, low, -INF, low, low, -INF], device=device)).tolist()
        assert found == [healthy[0], NO_TOKEN, healthy[2], NO_TOKEN, NO_TOKEN, at]


def test_nothing_kept_gives_zero(interpret: bool, device: torch.device) -> None:
    assert draw(torch.zeros(3, 40, device=device), interpret, cutoff=1.0).tolist() == [0, 0, 0]


def test_float64_logits_are_summed_and_compared_in_float64(interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(1, 200, dtype=torch.float64, device=device)
    logits[0, 150] = 1e-12
    assert draw(logits, interpret, temperature=0.0).tolist() == [150]
    level = torch.full((4, 200), 2.0**30, dtype=torch.float64, device=device)  # float32 is 128 apart here
    noise = gumbel_reference(torch.arange(4, device=device), torch.full((4,), 100, device=device), 200)
    assert draw(level, interpret).tolist() == noise.argmax(1).tolist()
    assert draw(level.float(), interpret).tolist() == [0, 0, 0, 0]


@settings(max_examples=5)
@given(order=st.permutations(range(9)), size=st.integers(1, 9))
def test_token_depends_on_key_and_position_alone(order: list[int], size: int, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(9, 333, generator=torch.Generator().manual_seed(3)).to(device)
    keys = torch.tensor([4, 9, 2**40], device=device)
    row_ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([7, 8, 9, 7, 8, 9, 30, 31, 32], device=device)
    tokens = draw(logits, interpret, keys=keys, row_ids=row_ids, positions=positions)
    some = torch.tensor(order[:size], device=device)
    swap = torch.tensor([2, 0, 1], device=device)  # row r is now at index swap[r]
    fewer = draw(
        logits[some],
        interpret,
        keys=keys[torch.argsort(swap)].contiguous(),
        row_ids=swap[row_ids[some].long()].to(torch.int32),
        positions=positions[some],
    )
    assert fewer.tolist() == tokens[some].tolist()


def test_rows_of_a_wider_tensor_are_read_in_place(interpret: bool, device: torch.device) -> None:
    wide = torch.full((6, 500), INF, device=device)
    logits = wide[::2, 100:437]
    logits.copy_(torch.randn(3, 337, device=device))
    assert draw(logits, interpret).tolist() == draw(logits.contiguous(), interpret).tolist()


def test_wrong_arguments_are_refused() -> None:
    good: dict[str, Any] = {
        "logits": torch.zeros(2, 8),
        "row_ids": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "keys": torch.zeros(3, dtype=torch.int64),
        "temperature": torch.zeros(3),
        "cutoff": torch.zeros(2),
        "out_ids": torch.zeros(2, dtype=torch.int32),
    }
    sample(**good)
    for name, bad in (
        ("logits", torch.zeros(2, 8, dtype=torch.int32)),
        ("row_ids", torch.zeros(2, dtype=torch.int64)),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("keys", torch.zeros(3, dtype=torch.int32)),
        ("temperature", torch.zeros(2)),
        ("cutoff", torch.zeros(2, dtype=torch.float64)),
        ("out_ids", torch.zeros(4, dtype=torch.int32)[::2]),
    ):
        with pytest.raises(ValueError, match=f"sample: {name} is "):
            sample(**{**good, name: bad})
    with pytest.raises(ValueError, match="sample: cutoff is float32"):
        sample(**{**good, "logits": torch.zeros(2, 8, dtype=torch.float64)})


@pytest.mark.parametrize("count", [2, 3])
def test_the_best_of_all_parts_is_the_draw_from_the_whole(count: int, interpret: bool, device: torch.device) -> None:
    """With ties, filtered, greedy and bad rows, and parts in which nothing is kept."""
    logits = (torch.randn(9, BLOCK + 300, device=device) * 3).round()
    logits[5, 9], logits[6, -3], logits[7] = NAN, INF, -INF
    logits[8, : BLOCK // 2] = -INF
    num, vocab = logits.shape
    temperature = torch.tensor([1.0, 0.0, 0.3, 0.0, 2.0, 1.0, 1.0, 1.0, 0.0], device=device)
    low = torch.tensor([-INF, -INF, 9.0, -INF, 4.0, -INF, -INF, -INF, -INF], device=device)
    rest = (torch.arange(num, dtype=torch.int32, device=device), torch.arange(num, device=device) + 70)
    keys = torch.arange(num, device=device) * 12345
    whole = torch.full((num,), POISON, dtype=torch.int32, device=device)
    sample(logits, *rest, keys, temperature, low, out_ids=whole, interpret=interpret)
    ids = torch.full((count, num), POISON, dtype=torch.int32, device=device)
    scores, tops = torch.full((2, count, num), NAN, device=device)
    for part in range(count):
        first, end = part * vocab // count, (part + 1) * vocab // count
        sample_part(
            logits[:, first:end], *rest, keys, temperature, low, first,
            out_ids=ids[part], out_scores=scores[part], out_tops=tops[part], interpret=interpret,
        )
        assert bool(((ids[part] >= first) & (ids[part] < end)).all())
    best = torch.where(scores == scores.amax(0), ids, vocab).amin(0)
    assert torch.where(tops.amax(0).isfinite(), best, NO_TOKEN).tolist() == whole.tolist()
    assert whole[5:8].tolist() == [NO_TOKEN] * 3
