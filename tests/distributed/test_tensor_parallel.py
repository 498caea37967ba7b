"""Several ranks compute one model: the same numbers as one process up to the order of sums, the same bits on all ranks.

In float64 a sum over ranks differs from one product by rounding alone: logits are compared to 1e-10, tokens exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.distributed.collectives import Collectives
from batchspec.engine.features.states import token_logits
from batchspec.errors import ConfigError
from batchspec.kernels.sampling.argmax import NO_TOKEN, argmax
from batchspec.model.decoder import ResidualStream
from batchspec.model.fused import rms_norm
from batchspec.model.layers.base import Shard, TensorSpec
from batchspec.model.quant.plain import Linear
from batchspec.model.shard import part_of as part_of_shape
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.vocabulary import greedy_of_ranks
from batchspec.model.weights import DummyWeights, taken
from tests.distributed.test_shard import FP8_BLOCK, SPECS, WIDE_QWEN, spec_of
from tests.helpers.engines import DEVICE, tiny_spec
from tests.helpers.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.helpers.moe_models import Noise
from tests.helpers.nvfp4_layouts import FP8_AND_NVFP4
from tests.helpers.nvfp4_layouts import of_compressed_tensors as nvfp4_of_compressed_tensors
from tests.helpers.ranks import Table, ThreadCollectives, bits, on_ranks, part_of, start_ranks, whole_of
from tests.model.test_fp8 import TOKEN, compressed

IDS = [[3, 9, 1, 22, 7, 7, 30], [5], [8, 2, 19, 4]]
LONG = [[(7 * i + 3) % 31 for i in range(23)], [2, 4, 8, 16]]


class Loud(Noise):
    """Noise with norms that are not 1, scales that differ, and large enough that a wrong part shows."""

    def _noise(self, tensor: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        found = super()._noise(tensor, shape)
        if tensor.role != "scale" or found.dtype is torch.uint8 or found.numel() == 1:
            return found
        factors = torch.linspace(0.5, 2.0, found.numel(), dtype=torch.float64, device=found.device)
        return (found.double() * factors[_order(found.numel())].view(shape)).to(found.dtype)

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        if name.endswith("norm.weight"):
            own = torch.linspace(0.5, 1.5, self._tensors[name].shape[0], dtype=found.dtype)
            cut = () if self._slices is None else self._slices[name]
            return taken(own, cut).clone() if cut else own
        return found.mul_(8) if name.endswith("proj.weight") and found.dtype is self.dtype else found


def _order(count: int) -> Tensor:
    """Neighbours are far apart: a scale taken from the next place is another one, in e4m3 too."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def batch_of(rows: list[list[int]], num_pages: int, page_size: int = 4) -> FlatBatch:
    """The rows end to end, each in pages of its own."""

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    lengths = [len(row) for row in rows]
    width = -(-max(lengths) // page_size)
    table = [[1 + r * width + page for page in range(width)] for r in range(len(rows))]
    assert 1 + len(rows) * width <= num_pages
    places = [(r, p) for r, row in enumerate(rows) for p in range(len(row))]
    return FlatBatch(
        token_ids=ints([token for row in rows for token in row]),
        row_ids=ints([r for r, _ in places]),
        positions=torch.tensor([p for _, p in places], device=DEVICE),
        slot_mapping=torch.tensor([table[r][p // page_size] * page_size + p % page_size for r, p in places], device=DEVICE),
        cu_seqlens_q=ints([sum(lengths[:r]) for r in range(len(rows) + 1)]),
        kv_len=ints(lengths),
        page_table=ints(table),
        max_q=max(lengths),
        max_kv=max(lengths),
    )


@torch.inference_mode()
def outputs(
    target: Target, rows: list[list[int]], *, ends_only: bool = False, adapters: list[int] | None = None
) -> dict[str, Tensor]:
    """Hidden states, aux hidden states, logits over the whole vocabulary, and greedy tokens of a pass over rows."""
    spec = target.spec
    cache = KVCache.allocate(
        spec.layer_states(target.dtype, 4, draft_len=0), groups=KVGroups.single(spec.num_paged_layers), page_size=4,
        num_pages=(40,), num_slots=len(rows), device=DEVICE,
    )
    aux_ids = (0, *range(1, spec.num_layers + 1))
    batch = batch_of(rows, 40)
    batch.row_adapters = None if adapters is None else torch.tensor(adapters, dtype=torch.int32, device=DEVICE)
    hidden, aux = target.forward(batch, cache, () if ends_only else aux_ids, ends_only=ends_only)
    found = {"hidden": hidden, "logits": target.all_logits(hidden), "greedy": target.greedy_sample(hidden, flag_nonfinite=True)}
    return found if aux is None else {**found, "aux": aux}


def assert_like_one(
    spec: ModelSpec, count: int, rows: list[list[int]], noise: Callable[..., DummyWeights] = Loud, *, ends_only: bool = False
) -> None:
    alone = outputs(whole_of(spec, noise), rows, ends_only=ends_only)
    found = on_ranks(count, lambda ranks: outputs(part_of(spec, ranks, noise), rows, ends_only=ends_only))
    assert float(alone["logits"].std()) > 1e-3
    for name, expected in alone.items():
        for own in found:
            torch.testing.assert_close(own[name], expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
            assert bits(own[name]) == bits(found[0][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in SPECS if "fp8" not in name])
def test_ranks_compute_what_one_process_does(name: str, ranks: int) -> None:
    assert_like_one(SPECS[name], ranks, IDS)
    assert_like_one(SPECS[name], ranks, LONG, ends_only=True)


@pytest.mark.parametrize("quantises", [False, True])
@pytest.mark.parametrize("name", [name for name in SPECS if "fp8" in name])
def test_fp8_blocks_are_the_same_on_ranks(name: str, quantises: bool) -> None:
    """Blocks of 128 inputs share a scale, of weights and of activations, and no block is divided; a calibrated scale is that of
    all inputs, and no product reads a rank's part of a sum."""
    spec = SPECS[name]
    spec = spec.with_fp8_activations() if quantises else spec
    if not quantises:
        assert_like_one(spec, 2, IDS)
        return
    alone = outputs(whole_of(spec, Loud), IDS)
    found = on_ranks(2, lambda ranks: outputs(part_of(spec, ranks, Loud), IDS))
    assert bits(found[0]["logits"]) == bits(found[1]["logits"])
    # An activation next to a rounding boundary of e4m3 may fall on its other side, where a sum differs in its last bit.
    torch.testing.assert_close(found[0]["logits"], alone["logits"], rtol=1e-6, atol=1e-6 * float(alone["logits"].abs().max()))


@pytest.mark.second
@settings(max_examples=25)
@given(st.data())
def test_any_shape_that_can_be_cut(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([2, 4]))
    kv_heads = data.draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * data.draw(st.sampled_from([group for group in (1, 2, 4) if kv_heads * group % count == 0] or [4]))
    shape: dict[str, Any] = {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": data.draw(st.sampled_from([2, 6])),
        "hidden_size": data.draw(st.integers(3, 20)), "intermediate_size": count * data.draw(st.integers(1, 7)),
        "vocab_size": data.draw(st.integers(31, 45)), "windows": data.draw(st.sampled_from([(None,), (3, None), (5, 5)])),
        **{flag: data.draw(st.booleans()) for flag in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie")},
    }
    spec = tiny_spec(**shape)
    rows = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=9), min_size=1, max_size=4))
    assert_like_one(spec, count, rows)


FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8 blocks": {"quantization_config": {**FP8_BLOCK, "modules_to_not_convert": ["in_proj_a", "in_proj_b", "in_proj_ba"]}},
    "fp8 rows": {"quantization_config": compressed("channel", TOKEN)},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
    "int4": {"quantization_config": of_compressed_tensors(32, symmetric=False, ignore=["re:.*in_proj_(a|b|ba)$"]).config},
    "int4 awq": {"quantization_config": of_awq(32, modules_to_not_convert=["in_proj_a", "in_proj_b", "in_proj_ba"]).config},
    "nvfp4": {"quantization_config": nvfp4_of_compressed_tensors(ignore=["re:.*in_proj_(a|b|ba)$"])},
    "nvfp4 experts": {"quantization_config": FP8_AND_NVFP4},
    "int4 act order": {"quantization_config": of_gptq(32, desc_act=True, dynamic={"-:.*in_proj_(a|b|ba)$": {}}).config},
}


DENSE = ("llama", "qwen3", "phi3", "glm4", "gemma3_text", "gemma4", "olmo2", "exaone4", "granitemoehybrid")
EXPERTS = ("mixtral", "qwen3_moe", "minimax_m2", "qwen3_next", "glm4_moe", "gemma4 experts")
MOE_SIZED = ("qwen3_moe", "qwen3_next", "glm4_moe", "gemma4 experts")
RECURRENT = ("qwen3_5_text", "qwen3_next")
CUT = [
    *((family, form) for family in (*DENSE, "qwen3_5_text", *EXPERTS) for form in ("plain", "fp8 blocks", "fp8 rows")),
    *((family, form) for family in (*DENSE, "qwen3_5_text", *EXPERTS) for form in FORMATS if "int4" in form),
    *((family, "nvfp4") for family in (*DENSE, "qwen3_5_text", *EXPERTS)), ("qwen3_moe", "nvfp4 experts"),
    *(("gpt_oss", form) for form in ("plain", "mxfp4") for _ in range(4)),
]
INNER_SIZES = {
    "fp8 blocks": st.sampled_from([128, 512, 640, 1024, 1100]), "mxfp4": st.sampled_from([32, 96, 128, 224, 288]),
    **{form: st.sampled_from([96, 128, 160, 256, 288]) for form in FORMATS if "int4" in form},
    **{form: st.sampled_from([16, 32, 80, 128, 240]) for form in FORMATS if "nvfp4" in form},
}
SIZES_TO_CUT = {"plain": (12, 22), "fp8 rows": (12, 40), "fp8 blocks": (128, 512), "mxfp4": (12, 128)}
"""Of a head and of an MLP, which two ranks can have halves of."""
HEAD_DIMS = {"fp8 blocks": [4, 64, 128], **{form: [8, 32, 64] for form in FORMATS if "int4" in form or "nvfp4" in form}}


def spec_to_cut(
    family: str, form: str, *, head_dim: int, inner_size: int, heads: int, kv_heads: int, vocab_size: int, tie: bool,
    experts: int, key_heads: int, of_key_head: int,
) -> ModelSpec:
    """of_key_head: value heads of each key head"""
    shape: dict[str, Any] = {
        "num_attention_heads": heads, "head_dim": head_dim, "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads, "intermediate_size": inner_size,
        "moe_intermediate_size": inner_size if family in MOE_SIZED else None,
        "shared_intermediate_size": inner_size if family == "granitemoehybrid" else None,
        "layer_types": ["attention"] if family == "granitemoehybrid" else None,
        "n_group": 1 if family == "glm4_moe" else None, "topk_group": 1 if family == "glm4_moe" else None,
        "first_k_dense_replace": 0 if family == "glm4_moe" else None,
        "shared_expert_intermediate_size": inner_size if family == "qwen3_next" else None,
        "partial_rotary_factor": 0.5 if family in ("phi3", "glm4", "glm4_moe", *RECURRENT) else None,
        "vocab_size": vocab_size, "tie_word_embeddings": tie,
        "num_experts" if family in MOE_SIZED and family != "glm4_moe" else "num_local_experts":
            experts if family in (*EXPERTS, "gpt_oss") else None,
    }
    if "int4" in form or "nvfp4" in form:
        shape["hidden_size"] = 64
    if family in RECURRENT:
        shape |= {
            "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * of_key_head,
            "linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim, "num_hidden_layers": 2,
        }
    if family.startswith("gemma4"):
        shape |= {"num_hidden_layers": 2, "global_head_dim": 2 * head_dim}
    if family == "phi3":
        shape["hidden_size"] = head_dim * shape["num_attention_heads"]
    return spec_of(family, **{name: value for name, value in shape.items() if value is not None}, **FORMATS[form])


@pytest.mark.second
@settings(max_examples=60)
@given(st.data())
def test_what_plan_lets_through_every_rank_loads_and_computes(data: st.DataObject) -> None:
    """Families x formats x ranks x sizes: `part_of` refuses a cut on all ranks, with one line, or the ranks do what one does."""
    family, form = data.draw(st.sampled_from(CUT))
    ranks = data.draw(st.sampled_from([2, 4, 8]))
    spec = spec_to_cut(
        family, form, head_dim=data.draw(st.sampled_from(HEAD_DIMS.get(form, [4, 12]))),
        inner_size=data.draw(INNER_SIZES.get(form, st.integers(1, 40) | st.integers(1, 6).map(lambda count: 8 * count))),
        heads=4 * data.draw(st.sampled_from([1, 2, 3])), kv_heads=data.draw(st.sampled_from([1, 2, 4])),
        vocab_size=data.draw(st.sampled_from([31, 33, 46])), tie=data.draw(st.booleans()),
        experts=data.draw(st.sampled_from([3, 4, 7])), key_heads=data.draw(st.sampled_from([2, 3, 4])),
        of_key_head=data.draw(st.sampled_from([1, 2])),
    )
    found: list[ModelSpec | str] = []
    for rank in range(ranks):
        try:
            found.append(part_of_shape(spec, Shard(rank, ranks)))
        except ConfigError as error:
            found.append(str(error))
    refused = [one for one in found if isinstance(one, str)]
    event(f"{form}, {'refused' if refused else 'cut'}")
    if refused:
        assert len(refused) == ranks
        assert all("\n" not in one and "cluster.tensor_parallel" in one for one in refused)
        return
    parts = [one for one in found if isinstance(one, ModelSpec)]
    assert sum(part.layers[0].mlp.inner_size for part in parts) == spec.layers[0].mlp.inner_size
    assert parts[0].layers[0].mlp.inner_size == max(part.layers[0].mlp.inner_size for part in parts)
    assert_like_one(spec, ranks, [[3, 9, 1], [5]])


@pytest.mark.second
@pytest.mark.parametrize(("family", "form"), dict.fromkeys(CUT))
def test_every_family_is_cut_in_every_format(family: str, form: str) -> None:
    """Of the shapes drawn above most are refused, and few of these pairs are among the others."""
    head_dim, inner_size = SIZES_TO_CUT.get(form, (64, 256))
    spec = spec_to_cut(
        family, form, head_dim=head_dim, inner_size=inner_size, heads=4, kv_heads=2, vocab_size=33, tie=False, experts=4,
        key_heads=2, of_key_head=2,
    )
    assert_like_one(spec, 2, [[3, 9, 1], [5]])


def test_a_layer_exchanges_twice_and_a_norm_over_all_heads_once_more() -> None:
    """Layers of Nemotron are one block each, and narrow experts besides a shared one exchange twice."""
    models = {"llama": (2, 2), "qwen3_moe": (2, 2), "minimax_m2": (3, 3), "nemotron_h, narrow experts": (1, 1, 1, 2)}
    models["falcon_h1"] = (2, 2)
    for name, of_layers in models.items():
        spec, table = SPECS[name], Table(2)

        def one_pass(ranks: Collectives, spec: ModelSpec = spec) -> None:
            target = part_of(spec, ranks)
            layers, groups = target.spec.layer_states(target.dtype, 4, draft_len=0), KVGroups.single(spec.num_paged_layers)
            cache = KVCache.allocate(layers, groups=groups, page_size=4, num_pages=(9,), num_slots=3, device=DEVICE)
            target.forward(batch_of(IDS, 9), cache)

        on_ranks(2, one_pass, table)
        own = sum(block.num_sums for _, block in spec.blocks()) + sum(mixer.num_rank_sums for _, mixer in spec.mixers)
        assert len(table.bytes_exchanged) == sum(of_layers) == own, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_is_in_the_order_of_ranks_and_rounded_once(dtype: torch.dtype) -> None:
    parts = torch.randn(4, 5, 7).to(dtype)
    found = on_ranks(4, lambda ranks: ranks.sum(parts[ranks.rank]))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected = (((parts[0].to(wide) + parts[1]) + parts[2]) + parts[3]).to(dtype)
    assert all(bits(own) == bits(expected) for own in found)


def test_bits_of_a_token_do_not_depend_on_the_tokens_beside_it() -> None:
    """Of what the exchange adds: with the same products a row's sum is the same in any batch."""
    parts = torch.randn(2, 9, 16)
    whole = on_ranks(2, lambda ranks: ranks.sum(parts[ranks.rank]))[0]
    alone = on_ranks(2, lambda ranks: ranks.sum(parts[ranks.rank][4:5]))[0]
    assert bits(alone) == bits(whole[4:5])


def test_products_leave_their_outputs_to_be_exchanged() -> None:
    stream = ResidualStream(torch.zeros(2, 4), ranks=ThreadCollectives(0, Table(1)))

    class Fusing(Linear):
        def norms_input(self, x: Tensor, *, gated: bool) -> bool:
            return True

    product = Fusing(torch.randn(4, 4))
    assert not stream.norms_in_product(product, gated=False)
    assert ResidualStream(torch.zeros(2, 4)).norms_in_product(product, gated=False)


@pytest.mark.parametrize("way", ["add_output", "add_product", "add_pairs"])
def test_whatever_reads_the_stream_reads_the_sum_of_all_ranks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm, a norm that quantises, or a product without one; after each way to leave outputs that are parts of a sum."""
    monkeypatch.setattr("batchspec.model.decoder.norm_quantised", lambda values, residual, *_: residual + values)
    monkeypatch.setattr("batchspec.distributed.collectives.norm_fp8", lambda values, residual, *_, **__: residual + values)

    class Quantising(Linear):
        fp8_form: Any = "any"

        def of_fp8(self, x: Any) -> Tensor:
            return x.clone()  # type: ignore[no-any-return]

    parts, weights, eye = torch.randn(2, 3, 8, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64), torch.eye(8).double()
    ones = torch.ones(8, dtype=torch.float64)

    def read(ranks: Collectives, how: str) -> Tensor:
        stream, own = ResidualStream(torch.zeros(3, 8, dtype=torch.float64), ranks=ranks), parts[ranks.rank]
        if way == "add_output":
            stream.add_output(own)
        elif way == "add_product":
            stream.add_product(Linear(eye), own, None, in_product=True)
        else:
            stream.add_pairs(own, weights)
        if how == "quantised":
            found: Tensor = stream.project(ones, 1e-6, Quantising(eye), None)
        elif how == "plain":
            found = stream.project(None, 1e-6, Linear(eye), None)
        else:
            found = stream.normed(ones, 1e-6)
        return found

    whole = parts.sum(0)
    expected = {"normed": rms_norm(whole, ones, 1e-6), "plain": whole, "quantised": whole}
    for how, value in expected.items():
        for found in on_ranks(2, lambda ranks, how=how: read(ranks, how)):  # type: ignore[misc]
            torch.testing.assert_close(found, value)


SPECIAL = st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, 1.0])


ROW = st.lists(st.one_of(SPECIAL, st.floats(-3, 3)), min_size=11, max_size=11)


@pytest.mark.second
@given(st.lists(ROW, min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]), st.booleans(), st.sampled_from([None, 1, 3, 6, 11]))
def test_the_greedy_token_of_ranks_is_that_of_all_logits(
    rows: list[list[float]], count: int, flag: bool, vocab: int | None
) -> None:
    logits = torch.tensor(rows)
    expected = torch.empty(len(rows), dtype=torch.int32)
    argmax(logits, out_ids=expected, vocab=vocab, flag_nonfinite=flag)
    cuts = [rank * 11 // count for rank in range(count + 1)]

    def choose(ranks: Collectives) -> Tensor:
        first, stop = cuts[ranks.rank : ranks.rank + 2]
        return greedy_of_ranks(logits[:, first:stop], first, ranks, vocab, flag_nonfinite=flag)

    for own in on_ranks(count, choose):
        assert own.tolist() == expected.tolist()
        assert flag or NO_TOKEN not in own.tolist()


@pytest.mark.second
@given(st.lists(st.lists(st.floats(-5, 5), min_size=11, max_size=11), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]))
def test_the_confidence_of_ranks_is_that_of_all_logits(rows: list[list[float]], count: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float64)
    expected, ids = torch.empty((2, len(rows)), dtype=torch.int32).unbind()
    argmax(logits, out_ids=ids, out_confidence=expected, vocab=9)
    cuts = [rank * 11 // count for rank in range(count + 1)]

    def choose(ranks: Collectives) -> Tensor:
        (first, stop), found = cuts[ranks.rank : ranks.rank + 2], torch.full_like(expected, -7)
        greedy_of_ranks(logits[:, first:stop], first, ranks, 9, out_confidence=found)
        return found

    odds = logits[:, :9].softmax(1).amax(1).logit()
    clear = ((4 * odds) % 1 - 0.5).abs() < 0.49  # at the edge of two bins, the order of a sum decides
    for own in on_ranks(count, choose):
        assert torch.equal(own[clear], expected[clear])


@pytest.mark.parametrize("count", [2, 4])
def test_logits_of_a_few_tokens_are_exchanged_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever ranks have them; the logits of the whole vocabulary would be much more than `reserve_bytes` holds back."""
    spec, sizes = replace(tiny_spec(), vocab_size=31), list[int]()
    hidden = torch.randn(5, spec.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits, ids = whole_of(spec, Loud).logits(hidden), (30, 2)
    gather = ThreadCollectives.gather

    def counted(ranks: ThreadCollectives, x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return gather(ranks, x)

    def found(ranks: Collectives) -> Tensor:
        return token_logits(ids, part_of(spec, ranks, Loud), hidden)

    monkeypatch.setattr(ThreadCollectives, "gather", counted)
    for own in on_ranks(count, found):
        torch.testing.assert_close(own, logits[:, list(ids)], rtol=1e-12, atol=1e-12)
    assert set(sizes) == {2 * len(hidden)}


def test_a_model_of_ranks_and_its_part_belong_together() -> None:
    spec = tiny_spec()
    with pytest.raises(AssertionError):
        Target(spec, DummyWeights(spec, dtype=torch.float64, device=DEVICE), DEVICE, ThreadCollectives(0, Table(1)))


def test_a_dummy_fp8_model_at_four_ranks() -> None:
    spec = spec_of("qwen3_moe", **{**WIDE_QWEN, "num_attention_heads": 4}, quantization_config=FP8_BLOCK)
    assert_like_one(replace(spec, layers=spec.layers[:1]), 4, IDS[:1])


def save_outputs(ranks: Collectives, out: Path) -> None:
    """The program of one process: what each model of a list computes."""
    found = {name: outputs(part_of(SPECS[name], ranks, Loud), IDS) for name in ("llama", "minimax_m2", "gpt_oss")}
    torch.save(found, out / str(ranks.rank))


@pytest.mark.second
@pytest.mark.parametrize("count", [2, 4])
def test_processes_over_gloo_have_the_bits_of_threads(count: int, tmp_path: Path) -> None:
    start_ranks(count, save_outputs, tmp_path)
    own = [torch.load(tmp_path / str(rank)) for rank in range(count)]
    for name, expected in own[0].items():
        spec = SPECS[name]
        threads = on_ranks(count, lambda ranks, spec=spec: outputs(part_of(spec, ranks, Loud), IDS))  # type: ignore[misc]
        for key in expected:
            assert all(bits(found[name][key]) == bits(threads[0][key]) for found in own), (name, key)
