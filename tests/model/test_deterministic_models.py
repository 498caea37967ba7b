"""decode.deterministic: what supports it, what is refused by name, and what depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec import run
from batchspec.bench.arguments import parse
from batchspec.commands import decode_again, plan_text
from batchspec.commands import planning as plan_command
from batchspec.commands import verify as verify_command
from batchspec.config.checks import check
from batchspec.config.compose import compose
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError
from batchspec.job import prepare
from batchspec.job.load import memory
from batchspec.kernels.common import card
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile
from batchspec.kernels.gemm.ordered_tiles import MIN_SEGMENT, SEGMENT_UNIT, ordered_tile, segments_of
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model import deterministic
from batchspec.model.deterministic import ORDER_VERSION, in_one_order
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.model.quant import fp8_products
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.ordered import OrderedLinear
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.weights import DummyWeights
from batchspec.tuning import policy
from batchspec.tuning.cards import known_card
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.stand_ins import H200, LLAMA_8B
from tests.job.test_job import arguments, prompts

pytestmark = pytest.mark.second

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ON = "decode.deterministic=true"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "has_same_bits_in_all_tiles", lambda device: True)


def config_with(*overrides: str) -> RunConfig:
    return compose(["model.path=m", "input.path=i", "output.dir=o", ON, *overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.tensor_parallel=2"], "decode.deterministic=true with cluster.tensor_parallel=2 is not supported; set it to 1"),
        (["draft=tree", "draft.path=head"], "decode.deterministic=true with draft.tree.topk=10 is not supported"),
    ],
)
def test_what_is_not_built_is_refused_before_anything_is_read(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check(config_with(*overrides))
    assert "\n" not in str(caught.value)


def test_chains_other_drafters_and_fp8_kv_are_accepted() -> None:
    for drafter in ("none", "lookup"):
        check(config_with(f"draft={drafter}"))
    check(config_with("cache.dtype=fp8"))


def test_a_bfloat16_model_on_hopper_sums_in_one_order_everywhere(hopper: None) -> None:
    spec = in_one_order(LLAMA_8B, CUDA, torch.bfloat16)
    assert spec.ordered
    assert spec.layers[0].attention.layout(spec.computing(torch.bfloat16, draft_len=0)).ordered
    assert spec.formats.of("model.layers.0.self_attn.q_proj") is not PLAIN
    assert not LLAMA_8B.ordered
    assert not LLAMA_8B.layers[0].attention.layout(LLAMA_8B.computing(torch.bfloat16, draft_len=0)).ordered
    assert LLAMA_8B.formats.of("model.layers.0.self_attn.q_proj") is PLAIN
    assert spec.weight_bytes(torch.bfloat16) == LLAMA_8B.weight_bytes(torch.bfloat16)


def test_devices_and_dtypes_without_it_are_refused_and_float64_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_one_order(LLAMA_8B, CPU, torch.float64) is LLAMA_8B
    with pytest.raises(ConfigError, match=r"on a CPU needs model.dtype=float64, and it is bfloat16"):
        in_one_order(LLAMA_8B, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"on a GPU is supported with model.dtype=bfloat16 only, and it is float32"):
        in_one_order(LLAMA_8B, CUDA, torch.float32)
    monkeypatch.setattr(deterministic, "has_same_bits_in_all_tiles", lambda device: False)
    monkeypatch.setattr(deterministic, "card_of", lambda device: known_card("A100-80GB").card)
    with pytest.raises(ConfigError, match=r"Hopper generation \(compute capability 9.0\), and this is A100-80GB"):
        in_one_order(LLAMA_8B, CUDA, torch.bfloat16)
    assert in_one_order(LLAMA_8B, CPU, torch.bfloat16, on_this_machine=False).ordered  # another machine will run it


def spec_of(shape: str) -> ModelSpec:
    return read_spec(COMMON | SHAPES[shape], "config.json")


def test_fp8_products_experts_in_mxfp4_and_fp8_weights_that_are_converted_are_supported(hopper: None) -> None:
    fp8 = spec_of("llama8b-fp8")
    for own in (fp8, fp8.with_fp8_activations()):
        made = in_one_order(own, CUDA, torch.bfloat16)
        assert made.ordered
        found = made.formats.of("model.layers.0.mlp.up_proj")
        assert isinstance(found, Fp8)
        assert found.ordered
        assert found.quantises == own.formats.quantises
    name = next(name for name in SHAPES if "oss" in name)
    oss = in_one_order(spec_of(name), CUDA, torch.bfloat16)
    assert type(oss.formats.of("model.layers.0.self_attn.q_proj")) is not type(PLAIN)


def test_fp8_rows_that_no_kernel_reads_are_refused(hopper: None) -> None:
    """Torch would multiply them. Once they are converted to bfloat16, a kernel multiplies them."""
    shape = COMMON | SHAPES["llama8b-fp8"] | {"intermediate_size": 1000}
    spec = read_spec(shape, "config.json")
    with pytest.raises(
        ConfigError, match=r"FP8 rows of 1000 numbers \(model.layers.0.mlp.down_proj\).*set model.activations=dtype"
    ):
        in_one_order(spec.with_fp8_activations(), CUDA, torch.bfloat16)
    assert in_one_order(spec, CUDA, torch.bfloat16).ordered


def test_an_ordered_fp8_product_never_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tile is that of `ordered_fp8_tile`."""
    monkeypatch.setattr(fp8_products, "has_fast_fp8", lambda device, dtype: True)
    monkeypatch.setattr(fp8_products, "has_scaled_mm", lambda device, dtype, *, blocked: True)
    monkeypatch.setattr(fp8_products, "library_scales", lambda scales, rows, k: scales)
    tiles: list[Fp8Tile] = []

    def product(x: Any, weight: Any, scales: Any, bias: Any, *, tile: Fp8Tile, **_: Any) -> torch.Tensor:
        tiles.append(tile)
        return torch.zeros(x.num_tokens, len(weight))

    def library(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("the library computes it")

    monkeypatch.setattr(fp8_products, "fp8_linear", product)
    monkeypatch.setattr(fp8_products, "scaled_mm", library)
    monkeypatch.setattr(fp8_products, "quantise_tokens", lambda x, form, interpret: fp8_products._quantise_plainly(x, form))
    weight = fp8_products.Fp8Weight(torch.ones(32, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))
    made = fp8_products.Fp8Linear([weight], None, "group", ordered=True)
    for tokens in (1, 300):
        made(torch.ones(tokens, 128, dtype=torch.bfloat16))
    assert tiles == [policy.ordered_fp8_tile(1), policy.ordered_fp8_tile(300)]
    with pytest.raises(AssertionError, match="library"):
        fp8_products.Fp8Linear([weight], None, "group")(torch.ones(300, 128, dtype=torch.bfloat16))


def test_fp8_weights_that_are_converted_are_multiplied_in_one_order() -> None:
    own = spec_of("llama8b-fp8").in_one_order()
    formats, shape = own.formats, (256, 384)
    name = "model.layers.0.mlp.up_proj"
    assert isinstance(formats.of(name), Fp8)
    weights = DummyWeights(own, dtype=torch.bfloat16, device=CPU)
    weights.stored = lambda name: {  # type: ignore[method-assign]
        True: torch.full((2, 3), 0.5), False: torch.arange(shape[0] * shape[1]).remainder(7).view(shape).to(torch.float8_e4m3fn)
    }["scale" in name]
    made = formats.of(name).load(weights, [name], bias=False)
    assert isinstance(made, OrderedLinear)
    assert torch.equal(made._weight, (weights.stored(name).float() * 0.5).bfloat16())


def test_experts_that_the_library_computes_are_refused(hopper: None) -> None:
    shape = {
        **COMMON, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "head_dim": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 36, "intermediate_size": 64, "norm_topk_prob": True,
    }
    with pytest.raises(ConfigError, match="experts with rows of 36 numbers are computed by the library"):
        in_one_order(read_spec(shape, "config.json"), CUDA, torch.bfloat16)
    assert in_one_order(read_spec(shape | {"moe_intermediate_size": 40}, "config.json"), CUDA, torch.bfloat16).ordered


def test_segments_depend_on_the_weight_alone_and_fit_every_tile() -> None:
    assert [segments_of(rows, 16384) for rows in (28672, 8192, 6144, 4096, 2048, 1024)] == [1, 1, 2, 2, 4, 4]
    assert segments_of(4096, 14336) == 2
    assert [segments_of(576, k) for k in (576, 4096, 8192)] == [1, 1, 2]
    for rows, k in ((6144, 4096), (4096, 14336), (2048, 8192), (576, 1536), (960, 576), (100, 16384)):
        segments = segments_of(rows, k)
        assert segments == 1 or (k % (segments * SEGMENT_UNIT) == 0 and k // segments >= MIN_SEGMENT)
        for tokens in (1, 64, 65, 128, 200, 512, 1024, 16384):
            for gated in (False, True):
                tile = ordered_tile(tokens, rows, k, segments, gated=gated)
                assert tile.block_m >= 64
                assert tile.split in (1, segments)
                assert not tile.per_sm
                assert SEGMENT_UNIT % tile.block_k == 0


def test_a_measured_tile_is_taken_where_it_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, Tile] = {}
    monkeypatch.setattr(policy, "measured_tile", lambda op, tokens, rows, k, device: measured.get(op))
    whole = Tile(64, 256, 64, 4, 4, True)
    by_estimate = policy.ordered_tile(256, 3072, 576, 1, CUDA)
    assert by_estimate == ordered_tile(256, 3072, 576, 1)
    measured["linear"] = whole
    assert policy.ordered_tile(256, 3072, 576, 1, CUDA) == whole
    assert policy.ordered_tile(256, 3072, 576, 1, CUDA, gated=True) == ordered_tile(256, 1536, 576, 1, gated=True)
    for other in (whole._replace(split=2), whole._replace(per_sm=1), whole._replace(block_m=32)):
        measured["linear"] = other
        assert policy.ordered_tile(256, 3072, 576, 1, CUDA) == by_estimate
    measured["linear"] = whole
    assert policy.ordered_tile(256, 3072, 2048, 2, CUDA) == ordered_tile(256, 3072, 2048, 2)  # it sums K as one segment


def test_greedy_tokens_and_logits_are_of_tiles_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, Tile] = {}
    monkeypatch.setattr(policy, "measured_tile", lambda op, tokens, rows, k, device: measured.get(op))
    assert [policy.ordered_head_tile(tokens, 49152, 576, CUDA).block_m for tokens in (1, 64, 65, 4096)] == [64, 64, 128, 128]
    measured["lm_head"] = Tile(256, 128, 64, 4, 8, True)
    assert policy.ordered_head_tile(512, 49152, 576, CUDA) == measured["lm_head"]
    measured["lm_head"] = Tile(32, 128, 64, 4, 8, True)
    assert policy.ordered_head_tile(512, 49152, 576, CUDA).block_m == 128


def test_tiles_follow_the_estimate() -> None:
    """Few programs: small tiles; many: large ones; K is divided among programs where they would be too few."""
    assert ordered_tile(256, 576, 1536, 1)[:3] == (64, 32, 128)  # as measured
    assert ordered_tile(16384, 6144, 4096, 2)[:3] == (256, 128, 64)
    assert ordered_tile(256, 4096, 14336, 2).split == 2
    assert ordered_tile(16384, 4096, 14336, 2).split == 1
    assert ordered_tile(256, 1536, 576, 1, gated=True) == Tile(64, 64, 128, 3, 4, True)  # as measured
    assert ordered_tile(64, 4096, 14336, 2) == Tile(64, 64, 128, 4, 4, False, 2)  # as measured


def test_products_take_their_segments_from_the_weight() -> None:
    assert OrderedLinear(torch.zeros(64, 8192, dtype=torch.bfloat16))._segments == 2


def test_the_bench_refuses_what_is_not_built() -> None:
    for given in (["--tensor-parallel", "2"], ["--draft", "tree"]):
        with pytest.raises(ConfigError, match="--deterministic is not supported with"):
            parse(["out.jsonl", "name", "--deterministic", *given], "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


def test_a_job_in_float64_runs_is_verified_and_is_another_job_than_one_without_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    out = tmp_path / "out"
    given = arguments(model, tmp_path / "prompts.parquet", out, "output.token_ids=true")
    assert run.main([*given, ON]) == 0
    assert run.main(given) == 2
    assert f"decode.deterministic: {ORDER_VERSION} -> null" in capsys.readouterr().err
    verified = verify_command.verify(out, 3)
    assert (verified.differences, verified.exact) == ([], True)
    job = decode_again.job_of(out, "float32", None)  # another dtype has bits of its own
    assert not job.config.decode.deterministic


def test_plan_refuses_it_on_a_cpu_and_warns_of_its_cost_on_a_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    given: list[Any] = arguments(model, tmp_path / "prompts.parquet", tmp_path / "out", ON, "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"on a CPU needs model.dtype=float64"):
        plan_command.plan(compose(given))
    free = 140 * 10**9
    for module in (plan_text, memory):
        monkeypatch.setattr(module, "free_memory", lambda device, weights=0: free - weights)
    monkeypatch.setattr(prepare, "choose_device", lambda name: CUDA)
    monkeypatch.setattr(card, "_read", lambda device: known_card("H200").card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(plan_command, "device_rates", lambda *_, **__: H200)
    monkeypatch.setattr(plan_command, "visible_gpus", lambda: ["0"])
    assert "deterministic  bf16 sums of one order" in plan_command.plan(compose(given)).text()
