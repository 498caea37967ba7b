"""FlashInfer's kernel for recurrent layers: which passes it takes, which states it reads and writes. A stand-in computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache import flash
from batchspec.kernels.common.card import Card
from batchspec.kernels.common.dry_run import dry_run
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs
from batchspec.model.blocks import flash_delta
from batchspec.model.blocks.flash_delta import FlashRows, flash_rows
from batchspec.model.blocks.gated_delta import GatedDeltaSpec
from batchspec.model.single_row import forward_row
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.kernels.gated_delta_cases import NAN, Row, Sizes, batch_of, copy_of, pick, poisoned_state, random_inputs
from tests.recurrent import LoudNoise, hybrid_spec

CPU = torch.device("cpu")
SIZES = Sizes(1, 2, 128, 128)
LONG = flash.SHORT + 64


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor, output: Tensor, output_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The recurrence of `chunk_gated_delta_rule` of FlashInfer, one token after another.

    As the kernel's launcher it refuses other shapes; as the kernel it multiplies the tokens after a row by zeros, up to the end
    of the row's last chunk.
    """
    num_tokens, value_heads = g.shape
    assert output_final_state
    assert cu_seqlens.dtype == torch.int64
    assert q.shape == k.shape == (num_tokens, k.shape[1], 128)
    assert v.shape == output.shape == (num_tokens, value_heads, 128)
    assert output_state.shape == (len(cu_seqlens) - 1, value_heads, 128, 128)
    assert initial_state is None or initial_state.shape == output_state.shape
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (q, k, v, output))
    given = (g, beta, output_state) if initial_state is None else (g, beta, output_state, initial_state)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
    queries, keys = (x.float().repeat_interleave(value_heads // k.shape[1], 1) for x in (q, k))
    for row, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        assert end > begin, "the kernel would never end"
        s = torch.zeros_like(output_state[row]) if initial_state is None else initial_state[row].clone()
        for t in range(begin, end):
            s = s * g[t, :, None, None]
            change = beta[t, :, None] * (v[t].float() - (s @ keys[t, :, :, None])[..., 0])
            s = s + change[..., None] * keys[t, :, None, :]
            output[t] = (s @ queries[t, :, :, None])[..., 0] * 128**-0.5
        after = slice(end, begin + (end - begin + 63) // 64 * 64)
        zero = 0.0 * (k[after].float().sum() + v[after].float().sum())
        output[begin + (end - begin - 1) // 64 * 64 : end] += zero
        output_state[row] = s + zero
    return output, output_state


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Mock:
    found = Mock(side_effect=stand_in)
    monkeypatch.setattr(flash_delta, "delta_rule", lambda device: found)
    return found


def rows_of(*rows: Row) -> tuple[FlatBatch, DeltaBatch]:
    """A pass as the host gives it, and what recurrent layers read of it."""
    delta = batch_of(rows, CPU)
    ends = [row.begin + row.num_tokens for row in rows]
    ints = torch.zeros(len(delta.positions), dtype=torch.int32)
    batch = FlatBatch(
        token_ids=ints, row_ids=delta.row_ids, positions=delta.positions, slot_mapping=ints.long(), cu_seqlens_q=delta.cu_seqlens,
        kv_len=torch.tensor(ends, dtype=torch.int32), page_table=ints[None], max_q=delta.max_tokens, max_kv=max(ends),
        host=HostLayout([row.num_tokens for row in rows], ends), slots=delta.slots.long(),
    )
    return batch, replace(delta, live=batch.kv_len)


def chosen(*rows: Row, **changes: Any) -> FlashRows | None:
    batch, delta = rows_of(*rows)
    return flash_rows(replace(batch, **changes), delta)


def test_long_passes_whose_lengths_the_host_knows_are_taken() -> None:
    found = chosen(Row(3, 0, LONG), Row(1, 0, 77))
    assert found is not None
    assert (found.bounds.tolist(), found.slots.tolist(), found.begin) == ([0, LONG, LONG + 77], [3, 1], None)
    found = chosen(Row(3, LONG, 1000), Row(1, 0, 77))
    assert found is not None
    assert found.begin is not None
    assert found.begin.tolist() == [False, True]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([Row(0, 0, flash.SHORT)], {}),
        ([Row(0, 0, LONG), Row(1, 0, 0)], {}),
        ([Row(0, 32, LONG)], {}),
        ([Row(0, LONG, 511)], {}),
        ([Row(0, 0, LONG), *(Row(i, 0, 64) for i in range(1, 5))], {}),
        ([Row(0, 0, LONG)], {"host": None}),
        ([Row(0, 0, LONG)], {"recurrence": "steps"}),
        ([Row(0, 0, LONG)], {"token_ids": torch.zeros(LONG + 1, dtype=torch.int32)}),
    ],
    ids=["short", "no tokens", "no multiple of 64", "few tokens", "many rows", "bounds alone", "steps", "padding"],
)
def test_other_passes_are_not(rows: list[Row], changes: dict[str, Any]) -> None:
    assert chosen(*rows, **changes) is None


def test_a_dry_run_takes_the_kernels_of_batchspec() -> None:
    found: list[FlashRows | None] = []
    dry_run(lambda: found.append(chosen(Row(0, 0, LONG))), CPU)
    assert found == [None]


@pytest.mark.parametrize("first", [0, 128])
def test_outputs_and_states_are_those_of_delta_chunks(rule: Mock, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go on from their slots' states, or begin in slots that hold NaN; slots of no row keep theirs."""
    monkeypatch.setattr(flash_delta, "SHORT", 0)
    monkeypatch.setattr(flash_delta, "TOKENS_PER_ROW", 1)
    flat, batch = rows_of(Row(4, first, 70), Row(1, 0, 3), Row(2, 0, 65))
    state = poisoned_state(5, SIZES, CPU, dtype=torch.bfloat16)
    if first:
        state.state[4] = torch.randn_like(state.state[4])
    wanted_state, inputs = copy_of(state), random_inputs(138, SIZES, CPU, dtype=torch.bfloat16)
    wanted, out = torch.full_like(inputs.v, NAN), torch.full_like(inputs.v, NAN)
    delta_chunks(inputs, wanted_state, batch, wanted)
    rows = flash_rows(flat, batch)
    assert rows is not None
    assert flash_delta.flash_delta(inputs, state, batch, rows, out)
    assert (rule.call_args.kwargs["initial_state"] is None) == (first == 0)
    torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(state.state, wanted_state.state, rtol=2**-6, atol=2**-6, equal_nan=True)
    assert state.state[[0, 3]].isnan().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "gates", "state"])
def test_numbers_that_are_not_finite_end_their_own_row_alone(name: str, rule: Mock) -> None:
    _, batch = rows_of(Row(0, 64, 70), Row(1, 64, 3), Row(2, 64, 9))
    inputs, state = random_inputs(82, SIZES, CPU, dtype=torch.bfloat16), poisoned_state(3, SIZES, CPU, dtype=torch.bfloat16)
    state.state.copy_(torch.randn_like(state.state))
    if name == "state":
        state.state[1] = NAN
    else:
        getattr(inputs, name)[70:73] = NAN
    out, begin = torch.empty_like(inputs.v), torch.zeros(3, dtype=torch.bool)
    rows = FlashRows(batch.cu_seqlens.long(), batch.slots.long(), begin)
    assert flash_delta.flash_delta(inputs, state, batch, rows, out)
    assert out[70:73].isnan().all()
    assert out[:70].isfinite().all()
    assert out[73:].isfinite().all()
    assert state.state[[0, 2]].isfinite().all()
    assert name == "q" or state.state[1].isnan().all()


@pytest.mark.parametrize(
    ("sizes", "dtype", "state_dtype"),
    [
        (Sizes(1, 2, 64, 128), torch.bfloat16, torch.float32), (Sizes(1, 2, 128, 64), torch.bfloat16, torch.float32),
        (SIZES, torch.float32, torch.float32), (SIZES, torch.bfloat16, torch.bfloat16),
    ],
)
def test_other_layers_are_left_as_they_are(sizes: Sizes, dtype: torch.dtype, state_dtype: torch.dtype, rule: Mock) -> None:
    _, batch = rows_of(Row(0, 0, 5))
    inputs, state = random_inputs(5, sizes, CPU, dtype=dtype), poisoned_state(1, sizes, CPU, dtype=dtype, state_dtype=state_dtype)
    before, rows = pick(inputs, torch.arange(5)), FlashRows(batch.cu_seqlens.long(), batch.slots.long(), None)
    assert not flash_delta.flash_delta(inputs, state, batch, rows, torch.empty_like(inputs.v))
    assert all(torch.equal(getattr(inputs, name), getattr(before, name)) for name in DeltaInputs.__slots__)
    rule.assert_not_called()


def hybrid() -> ModelSpec:
    spec = hybrid_spec()
    layers = [
        replace(layer, mixer=replace(layer.mixer, num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128))
        if isinstance(layer.mixer, GatedDeltaSpec)
        else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def test_a_model_takes_it_in_each_recurrent_layer_unless_sums_have_one_order(rule: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_delta, "SHORT", 0)
    monkeypatch.setattr(flash_delta, "TOKENS_PER_ROW", 1)
    target = Target(hybrid(), LoudNoise(hybrid(), dtype=torch.bfloat16, device=CPU), CPU)
    ids = [at % target.spec.vocab_size for at in range(70)]
    hidden, cache = forward_row(target, ids, fp8=False)
    assert rule.call_count == 2
    target.spec = target.spec.in_one_order()
    wanted, own = forward_row(target, ids, fp8=False)
    assert rule.call_count == 2
    assert (hidden - wanted).norm() < 0.02 * wanted.norm()
    for layer in (0, 2):
        state, after = cache.target_rows[layer][0], own.target_rows[layer][0]
        assert 0 < (state - after).norm() < 0.02 * after.norm()


HOPPER = Mock(spec=Card, capability=(9, 0))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a FlashInfer with these modules in the place of an installed one; what it has is asked anew."""

    def install(**modules: SimpleNamespace) -> None:
        monkeypatch.setattr(flash, "flashinfer", lambda: object())
        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**modules))
        for name in ("gdn_kernels", "gdn_prefill"):
            monkeypatch.setitem(sys.modules, f"flashinfer.{name}", modules.get(name))
        for asked in (flash.has_delta_rule, flash.delta_rule):
            asked.cache_clear()

    yield install
    for asked in (flash.has_delta_rule, flash.delta_rule):
        asked.cache_clear()


SINCE_0_7 = SimpleNamespace(chunk_gated_delta_rule_sm90=object())


@pytest.mark.parametrize("capability", [(10, 0), (8, 0)])
def test_other_cards_have_none(capability: tuple[int, int], installed: Callable[..., None]) -> None:
    installed(gdn_kernels=SINCE_0_7)
    assert flash.has_delta_rule(HOPPER)
    assert not flash.has_delta_rule(Mock(spec=Card, capability=capability))


@pytest.mark.parametrize("kernels", [None, SimpleNamespace(), SimpleNamespace(chunk_gated_delta_rule_sm90=None)])
def test_versions_that_need_nvcc_for_it_or_miss_cute_dsl_have_none(
    kernels: SimpleNamespace | None, installed: Callable[..., None]
) -> None:
    installed(**({} if kernels is None else {"gdn_kernels": kernels}))
    assert not flash.has_delta_rule(HOPPER)


def test_if_it_does_not_compile_one_warning_says_so(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule = Mock(side_effect=RuntimeError("No such file libcuda.so\nand much more"))
    installed(gdn_kernels=SINCE_0_7, gdn_prefill=SimpleNamespace(chunk_gated_delta_rule=rule))
    monkeypatch.setattr(flash, "card_of", lambda device: HOPPER)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    for _ in range(2):
        assert flash.delta_rule(torch.device("cuda")) is None
    assert caplog.messages == [
        "FlashInfer cannot compile its gated delta rule (No such file libcuda.so): batchspec's own is used, which takes longer"
    ]


def test_a_cpu_never_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imports: Callable[[], None] = Mock(side_effect=AssertionError)
    monkeypatch.setattr(flash, "flashinfer", imports)
    assert flash.delta_rule(CPU) is None
