"""LoRA adapters that are not merged: of single rows (model.adapters), and over weights in FP8 and MXFP4 (model.adapter).

The oracle is that of tests/model/test_lora.py: transformers' model with s B A added to its weights, one model for each adapter.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

import batchspec
from batchspec import cli, run
from batchspec.commands import verify_kv
from batchspec.commands.verify import verify
from batchspec.config.checks import MAX_ADAPTERS
from batchspec.config.compose import compose
from batchspec.config.decode_schema import DecodeConfig
from batchspec.engine.slots import expected_pages
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import open_model
from batchspec.kernels.lora.lora_shrink import RANKS, num_splits
from batchspec.kernels.lora.lora_tokens import block_of, max_tiles
from batchspec.model.kv_calibration import calibrate
from batchspec.model.layers.base import Shard
from batchspec.model.lora import open_adapter
from batchspec.model.lora_products import AdaptedProduct, AdapterSet
from batchspec.model.lora_shape import LoraShape
from batchspec.model.shard import part_of
from batchspec.model.single_row import forward_row
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.packing.cost import read_bytes, round_seconds
from batchspec.packing.memory import reserve_bytes
from tests.distributed.test_tensor_parallel import IDS, outputs
from tests.helpers.gemma4_models import DENSE, LAYER_INPUTS
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import make_jobs_quick
from tests.helpers.stand_ins import H200
from tests.kernels.lora_cases import PRODUCTS
from tests.model.test_dense_families import MODELS
from tests.model.test_fp8_block import make_fp8
from tests.model.test_lora import CPU, OF_RECURRENT, RECURRENT, make_adapter, products
from tests.model.test_target import Runner, oracle, prompts

pytestmark = pytest.mark.second

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
}


def opened(base: Path, folders: Mapping[str, Path]) -> tuple[ModelSpec, AdapterSet]:
    spec = load_spec(base)
    found = tuple(open_adapter(str(folder), spec, per_row=True) for folder in folders.values())
    adapters = AdapterSet(found, names=tuple(folders))
    return spec.with_lora(adapters.shape), adapters


def loaded(base: Path, folders: Mapping[str, Path], dtype: torch.dtype = torch.float32) -> Target:
    spec, adapters = opened(base, folders)
    return Target.load(base, spec, dtype=dtype, device=CPU, adapters=adapters)


@torch.inference_mode()
def merged_logits(base: Path, deltas: Mapping[str, Tensor], ids: list[int]) -> Tensor:
    """[T, V] of transformers."""
    model = oracle(base)
    for module, delta in deltas.items():
        weight = model.get_submodule(module).weight
        weight.copy_(weight.double() + delta)
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


Adapters = list[tuple[dict[str, float], dict[str, Any]]]
"""Of each adapter the scale of each module, by its last part, and its keys."""
CASES: dict[str, tuple[str, dict[str, Any], Adapters]] = {
    "llama": ("llama", ODD, [
        (dict.fromkeys(ALL, 2.0), {}),
        (dict.fromkeys(ALL, 0.5), {"r": 33, "lora_alpha": 16.5}),
        ({"q_proj": 2.0, "down_proj": 2.0}, {"r": 1, "lora_alpha": 2}),
    ]),
    "qwen3, rank-stabilised and by patterns": ("qwen3", {}, [
        ({"v_proj": 2.0, "up_proj": 2.0}, {"use_rslora": True, "r": 16, "lora_alpha": 8}),
        ({"k_proj": 8.0, "o_proj": 0.5, "up_proj": 3.0},
         {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 4, r"mlp\..*": 24}}),
    ]),
    "phi3, fused projections": (*MODELS["phi3 window"], [
        ({"qkv_proj": 2.0, "gate_up_proj": 2.0}, {}), ({"o_proj": 2.0, "down_proj": 2.0}, {"r": 64, "lora_alpha": 128}),
    ]),
    "gemma3, norms after products": (*MODELS["gemma3"], [(dict.fromkeys(ALL, 2.0), {}), ({"gate_proj": 2.0}, {})]),
    "gemma4, layers with and without v_proj": ("gemma4_text", DENSE, [
        (dict.fromkeys(("q_proj", "k_proj", "o_proj", "up_proj", "down_proj"), 2.0), {}), ({"k_proj": 2.0, "gate_proj": 2.0}, {}),
    ]),
    "gemma4, late layers with queries alone and products of layer inputs": ("gemma4_text", LAYER_INPUTS, [
        (dict.fromkeys(("q_proj", "k_proj", "o_proj", "up_proj"), 2.0), {}),
        ({"per_layer_input_gate": 2.0, "per_layer_projection": 2.0, "per_layer_model_projection": 2.0}, {}),
    ]),
    "granite 4, factors after products": (*MODELS["granite 4"], [
        ({"q_proj": 2.0, "o_proj": 2.0, "input_linear": 2.0, "output_linear": 2.0}, {}), ({"output_linear": 2.0}, {}),
    ]),
    "attention beside experts": ("mixtral", {"num_local_experts": 4}, [
        ({"q_proj": 2.0, "o_proj": 2.0}, {}), ({"k_proj": 2.0, "v_proj": 2.0}, {}),
    ]),
    "layers that recur, and one that attends": ("qwen3_5_text", RECURRENT | {"num_hidden_layers": 3}, [
        (dict.fromkeys(OF_RECURRENT, 2.0), {}), ({"in_proj_z": 2.0, "k_proj": 2.0, "up_proj": 2.0}, {"r": 3, "lora_alpha": 6}),
    ]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_row_has_the_logits_of_transformers_with_its_adapter_merged(name: str, tmp_path: Path) -> None:
    """Prefill of all rows in one pass, then a few tokens more of each."""
    family, shape, adapters = CASES[name]
    base = make_checkpoint(tmp_path / "base", family, **{"num_hidden_layers": 2, **shape})
    folders = {
        f"a{i}": make_adapter(tmp_path / f"a{i}", base, list(scales), seed=i, **config)
        for i, (scales, config) in enumerate(adapters)
    }
    own = [0, *range(1, len(adapters) + 1), 1]
    ids = prompts([19, 30, 7, 12, 5][: len(own)])
    target = loaded(base, folders)
    runner = Runner.start(target, len(own))
    first, _ = runner.feed([row[:-3] for row in ids], adapters=own)
    then, _ = runner.feed([row[-3:] for row in ids], adapters=own)
    plain = merged_logits(base, {}, ids[1])
    for row, number, before, after in zip(ids, own, first, then, strict=True):
        deltas = products(folders[f"a{number - 1}"], adapters[number - 1][0]) if number else {}
        expected = merged_logits(base, deltas, row)
        torch.testing.assert_close(torch.cat((before, after)), expected, atol=1e-4, rtol=0)
    assert float((torch.cat((first[1], then[1])) - plain).abs().max()) > 0.1


def test_the_bits_of_a_row_without_an_adapter_are_those_of_the_base_model(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=2, **ODD)
    folders = {"a": make_adapter(tmp_path / "a", base, ALL)}
    ids = prompts([9, 9])
    adapted, _ = Runner.start(loaded(base, folders), 2).feed(ids, adapters=[0, 0])
    plain, _ = Runner.start(Target.load(base, load_spec(base), dtype=torch.float32, device=CPU), 2).feed(ids)
    for found, expected in zip(adapted, plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # products in other shapes


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ALL), ("phi3", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]), ("qwen3_5_text", OF_RECURRENT)],
)
def test_two_ranks_have_the_outputs_of_one_process(family: str, targets: list[str], tmp_path: Path) -> None:
    shape = RECURRENT if family == "qwen3_5_text" else {}
    base = make_checkpoint(tmp_path / "base", family, dtype=torch.float64, num_hidden_layers=2, **shape)
    folders = {f"a{i}": make_adapter(tmp_path / f"a{i}", base, targets, seed=i, r=5 + i) for i in range(2)}
    spec, adapters = opened(base, folders)

    def of_rank(ranks: Any) -> dict[str, Tensor]:
        part = part_of(spec, Shard(ranks.rank, ranks.ranks))
        return outputs(
            Target.load(base, part, dtype=torch.float64, device=CPU, ranks=ranks, adapters=adapters), IDS, adapters=own
        )

    own = [2, 0, 1]
    alone = outputs(loaded(base, folders, torch.float64), IDS, adapters=own)
    assert (
        float((alone["logits"] - outputs(loaded(base, folders, torch.float64), IDS, adapters=[0, 0, 0])["logits"]).abs().max())
        > 0.1
    )
    for found in on_ranks(2, of_rank):
        torch.testing.assert_close(found["logits"], alone["logits"], rtol=1e-10, atol=1e-10)


# --- over quantised weights


def test_an_adapter_of_an_fp8_checkpoint_is_added_to_its_products(tmp_path: Path) -> None:
    """Of blocks of 128 x 128, whose weights the CPU converts at load; lm_head, which is plain, is merged."""
    fp8, plain = make_fp8(tmp_path, "qwen3", tie_word_embeddings=False)
    scales = {"q_proj": 2.0, "gate_proj": 2.0, "down_proj": 2.0, "lm_head": 2.0}
    folder = make_adapter(tmp_path / "adapter", plain, list(scales))
    adapter = open_adapter(str(folder), load_spec(fp8))
    kept = {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"}
    assert set(adapter.kept) == kept
    merged = ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert set(adapter.deltas) == {f"{name}.weight" for name in merged}  # what the checkpoint holds plain
    adapters = AdapterSet((adapter,))
    spec = load_spec(fp8).with_lora(adapters.shape)
    target = Target.load(fp8, spec, dtype=torch.float32, device=CPU, adapter=adapter, adapters=adapters)
    (ids,) = prompts([40])
    (found,), _ = Runner.start(target, 1).feed([ids], adapters=[1])
    torch.testing.assert_close(found, merged_logits(plain, products(folder, scales), ids), atol=1e-4, rtol=0)


def test_products_that_quantise_their_input_add_the_adapter_to_what_they_read_before(tmp_path: Path) -> None:
    fp8, plain = make_fp8(tmp_path, "qwen3")
    folder = make_adapter(tmp_path / "adapter", plain, ["gate_proj", "up_proj", "o_proj"])
    adapters = AdapterSet((open_adapter(str(folder), load_spec(fp8)),))
    spec = load_spec(fp8).with_fp8_activations()
    base = Target.load(fp8, spec, dtype=torch.float32, device=CPU)
    adapted = Target.load(fp8, spec.with_lora(adapters.shape), dtype=torch.float32, device=CPU, adapters=adapters)
    x = torch.randn(7, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens = adapted._lora.tokens(torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.int32))  # type: ignore[union-attr]
    (one, other) = (target._layers[0]._mlps[0]._gate_up for target in (base, adapted))  # type: ignore[attr-defined]
    assert isinstance(other, AdaptedProduct)
    assert other.fp8_form is None  # the kernel before it must leave the row as the adapter reads it
    deltas = products(folder, dict.fromkeys(("gate_proj", "up_proj", "o_proj"), 2.0))
    both = torch.cat([deltas[f"model.layers.0.mlp.{part}"] for part in ("gate_proj", "up_proj")])
    expected = one(x, None) + torch.where(torch.tensor([1, 0, 1, 1, 0, 1, 1])[:, None] > 0, x.double() @ both.T, 0.0).float()
    torch.testing.assert_close(other(x, tokens), expected, atol=1e-4, rtol=0)


# --- what is refused


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("base"), "llama", dtype=torch.float64, num_hidden_layers=2)
    return make_tokenizer(folder)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(place / name, base, ["q_proj", "up_proj"], seed=i) for i, name in enumerate(("math", "code"))}


@pytest.mark.parametrize(
    ("targets", "config", "named"),
    [
        (["lm_head"], {}, "lm_head has an adapter; adapters of single rows are supported in attention and dense MLPs"),
        (["q_proj"], {"r": 65}, "q_proj has rank 65, above 64, the limit of adapters that cannot be merged"),
    ],
)
def test_what_rows_of_their_own_cannot_have_is_refused_by_name(
    targets: list[str], config: dict[str, Any], named: str, base: Path, tmp_path: Path
) -> None:
    folder, spec = make_adapter(tmp_path / "adapter", base, targets, **config), load_spec(base)
    open_adapter(str(folder), spec)  # merged it can be
    with pytest.raises(CheckpointError, match=named) as caught:
        open_adapter(str(folder), spec, per_row=True)
    assert "\n" not in str(caught.value)


def test_experts_of_rows_are_refused(tmp_path: Path) -> None:
    mixtral = make_checkpoint(tmp_path / "mixtral", "mixtral", num_hidden_layers=1, num_local_experts=4)
    folder = make_adapter(tmp_path / "of_experts", mixtral, ["w1"])
    with pytest.raises(CheckpointError, match="adapters of MoE experts are not supported"):
        open_adapter(str(folder), load_spec(mixtral), per_row=True)


ROWS = [None, "math", "code", "math", None, "code", "code", "math"]
KEYS = ["packing.max_num_seqs=3", "decode.max_new_tokens=12", "input.chat=true", "device=cpu", "output.shard_rows=3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of each prompt, with different adapters."""
    path = tmp_path_factory.mktemp("data") / "prompts.parquet"
    rows = [{"id": f"q{i}", "prompt": f"Say word{i // 2} again", "adapter": own} for i, own in enumerate(ROWS)]
    pl.DataFrame(rows).write_parquet(path)
    return path


def named(folders: Mapping[str, Path]) -> str:
    return f"model.adapters={{{','.join(f'{name}:{folder}' for name, folder in folders.items())}}}"


def words(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [f"model.path={model}", f"input.path={data}", f"output.dir={out}", *KEYS, *more]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["{adapters}", "model.adapter={math}"], "is for all rows, and model.adapters={math,code} for rows that name one"),
        (["{adapters}", "model.load_format=dummy"], "model.adapters={math,code}: model.load_format=dummy has no weights"),
        (["{adapters}", "cache.dtype=fp8"], "model.adapters={math,code} with cache.dtype=fp8 needs cache.scales=calibrate"),
        (["{adapters}", "input.columns.adapter=null"], "the input has no column that names the adapter of each row"),
        ([], "column 'adapter' names LoRA adapters, and model.adapters has none"),
        (["model.adapters={{gone:/no/such/folder}}"], "model.adapters.gone=/no/such/folder: no such folder"),
        (["model.adapters={{a:https://me:secret@host/x}}"], "model.adapters holds credentials in a URL"),
        (["model.adapters={{" + ",".join(f"a{i}:x" for i in range(MAX_ADAPTERS + 1)) + "}}"], "at most 256 are supported"),
    ],
)
def test_keys_and_columns_that_do_not_fit_each_other_are_refused_by_run_and_plan(
    keys: list[str], said: str, base: Path, folders: dict[str, Path], data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = [key.format(adapters=named(folders), **folders) for key in keys]
    for command in ("run", "plan"):
        assert cli.main([command, *words(base, data, tmp_path / "out", *more)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sums_of_one_order_are_refused_where_adapters_depend_on_the_batch(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """For a GPU's job; in float64 no token shows the order."""
    more = [named(folders), "decode.deterministic=true"]
    with pytest.raises(ConfigError, match=r"with LoRA adapters that are not merged .* is not supported"):
        open_model(compose(words(base, data, tmp_path / "out", *more, "model.dtype=bfloat16")), on_this_machine=False)
    assert open_model(compose(words(base, data, tmp_path / "out", *more))).adapters is not None
    merged = [f"model.adapter={folders['math']}", "decode.deterministic=true", "model.dtype=bfloat16"]
    assert open_model(compose(words(base, data, tmp_path / "out", *merged)), on_this_machine=False).adapters is None


# --- jobs


def answers(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data/*.parquet").select("request_id", "status", "completion", "token_ids").sort("request_id")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_jobs_quick(monkeypatch)


@pytest.mark.usefixtures("quick")
def test_rows_of_a_job_have_the_answers_of_jobs_with_their_adapter_merged(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = tmp_path / "out", named(folders)
    assert run.main(words(base, data, out, own, "draft=lookup")) == 0
    found = answers(out)
    for name in (None, *folders):
        merged = [] if name is None else [f"model.adapter={folders[name]}"]
        alone = tmp_path / f"out_{name}"
        assert run.main(words(base, data, alone, *merged, "draft=none", "input.columns.adapter=null")) == 0
        ids = [f"q{i}" for i, own_name in enumerate(ROWS) if own_name == name]
        assert found.filter(pl.col("request_id").is_in(ids)).equals(answers(alone).filter(pl.col("request_id").is_in(ids)))
        assert not found.equals(answers(alone))
    assert pl.read_parquet(out / "data/*.parquet").sort("request_id")["adapter"].to_list() == ROWS

    card = (out / "README.md").read_text()
    digests = {name: open_adapter(str(folder), load_spec(base)).digest for name, folder in folders.items()}
    assert (
        f"| LoRA adapters of rows | `math`: `math` (sha256 {digests['math']}), `code`: `code` (sha256 {digests['code']}) |"
        in card
    )
    assert str(folders["math"]) not in card

    # The same adapters elsewhere and in another order are the same job; other ones, or other names, are not.
    capsys.readouterr()
    moved = {name: shutil.copytree(folder, tmp_path / f"moved_{name}") for name, folder in reversed(folders.items())}
    assert run.main(words(base, data, out, named(moved), "draft=lookup")) == 0
    assert "already complete" in capsys.readouterr().err
    values = json.loads((moved["math"] / "adapter_config.json").read_text())
    (moved["math"] / "adapter_config.json").write_text(json.dumps({**values, "lora_alpha": 17}))
    for other in (moved, {"math": folders["code"], "code": folders["math"]}, {**folders, "more": folders["math"]}):
        assert run.main(words(base, data, out, named(other), "draft=lookup")) == 2
        assert "holds another job (model.adapters: " in capsys.readouterr().err
    assert run.main(words(base, data, out, "input.columns.adapter=null", "draft=lookup")) == 2
    assert "model.adapters: " in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_prompts_are_scored_with_the_adapter_of_their_row(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    usual = f"decode.max_new_tokens={DecodeConfig().max_new_tokens}"
    more = ["decode.score=prompts", usual, "output.prompt_logprobs=0", "draft=none"]

    def scores(out: Path) -> list[list[float]]:
        found = pl.read_parquet(out / "data/*.parquet").sort("request_id")["prompt_logprobs"].to_list()
        return [[value for value in row if value is not None] for row in found]

    assert run.main(words(base, data, tmp_path / "out", named(folders), *more)) == 0
    found = scores(tmp_path / "out")
    for name in (None, *folders):
        merged = [] if name is None else [f"model.adapter={folders[name]}"]
        alone = tmp_path / f"out_{name}"
        assert run.main(words(base, data, alone, *merged, *more, "input.columns.adapter=null")) == 0
        for own_name, row, expected in zip(ROWS, found, scores(alone), strict=True):
            assert (row == pytest.approx(expected, abs=1e-6)) is (own_name == name)


@pytest.mark.usefixtures("quick")
def test_rows_are_verified_with_their_adapters(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out", list[int]()
    assert run.main(words(base, data, out, named(folders), "draft=lookup")) == 0
    verified = verify(out, 0)
    assert (verified.num_rows, verified.differences) == (len(ROWS), [])

    def noted(target: Target, ids: list[int], *, fp8: bool, adapter: int = 0) -> Any:
        seen.append(adapter)
        return forward_row(target, ids, fp8=fp8, adapter=adapter)

    monkeypatch.setattr(verify_kv, "forward_row", noted)
    verify_kv.compare_kv(out, 0)
    numbers = {None: 0, "math": 1, "code": 2}
    assert seen == [numbers[own] for own in ROWS for _ in range(2)]


@pytest.mark.usefixtures("quick")
def test_an_unknown_name_is_an_error_row_and_no_other_row_is_changed(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"prompt": "Say it again", "adapter": own} for own in ("math", "maths", "", None)]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    assert run.main(words(base, tmp_path / "in.parquet", tmp_path / "out", named(folders), "draft=none")) == 0
    frame = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert frame["status"].is_in(["ok", "truncated"]).to_list() == [True, False, False, True]
    error = frame["error"].to_list()[1]
    assert error["code"] == "bad_parameter"
    assert "adapter='maths' is none of model.adapters (math, code); correct it or leave it null" in error["message"]


@pytest.mark.usefixtures("quick")
def test_names_in_json_lines_are_read_and_other_values_are_error_rows(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    lines = [{"prompt": "Say it", "adapter": own} for own in ("code", 3, None, {"a": 1})]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.main(words(base, tmp_path / "in.jsonl", tmp_path / "out", named(folders), "draft=none")) == 0
    statuses = pl.read_parquet(tmp_path / "out/data/*.parquet")["status"]
    assert statuses.is_in(["ok", "truncated"]).to_list() == [True, False, True, False]


@pytest.mark.usefixtures("quick")
def test_rows_that_pages_run_out_for_keep_their_adapter(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few pages preempt rows, which are prefilled again."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 1)
    more = [named(folders), "draft=lookup", "decode.max_new_tokens=90"]
    assert run.main(words(base, data, tmp_path / "plenty", *more)) == 0
    assert run.main(words(base, data, tmp_path / "few", *more, "packing.pages=15")) == 0
    assert answers(tmp_path / "few").equals(answers(tmp_path / "plenty"))
    prefills = pl.read_parquet(tmp_path / "few/data/*.parquet")["spec_decode"].struct.field("num_prefills").to_list()
    assert max(prefills) > 1


@pytest.mark.usefixtures("quick")
def test_truncated_rows_resume_with_their_adapter(base: Path, folders: dict[str, Path], data: Path, tmp_path: Path) -> None:
    more = [named(folders), "draft=lookup", "decode.ignore_eos=true"]
    assert run.main(words(base, data, tmp_path / "whole", *more, "decode.max_new_tokens=30")) == 0
    assert run.main(words(base, data, tmp_path / "resumed", *more)) == 0
    assert run.main(words(base, data, tmp_path / "resumed", *more, "resume=length", "decode.max_new_tokens=30")) == 0
    assert answers(tmp_path / "resumed").equals(answers(tmp_path / "whole"))


def test_a_warm_engine_takes_the_column_and_keeps_prefixes_apart(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    keys = {"input.chat": True, "decode.max_new_tokens": 12, "packing.max_num_seqs": 2, "device": "cpu", "draft": "none"}
    prompt = "Say it again and again, " * 6

    def tokens(engine: batchspec.Engine, own: list[str | None]) -> list[Any]:
        return engine.generate({"prompt": [prompt] * len(own), "adapter": own})["token_ids"].to_list()

    with batchspec.Engine({"model.path": str(base), "model.adapters": {k: str(v) for k, v in folders.items()}, **keys}) as engine:
        math, code, plain = tokens(engine, ["math", "code", None])
        assert [*tokens(engine, ["code"]), *tokens(engine, [None]), *tokens(engine, ["math"])] == [code, plain, math]
        assert engine.generate({"prompt": [prompt]})["token_ids"].to_list() == [plain]
        assert engine.generate({"prompt": [prompt], "adapter": ["other"]})["status"].to_list() == ["error"]
        engine.load_weights(base)
        assert tokens(engine, ["code", "math"]) == [code, math]
    assert len({tuple(found) for found in (math, code, plain)}) == 3


def test_a_turn_of_a_conversation_keeps_the_adapter_of_its_row(base: Path, folders: dict[str, Path]) -> None:
    keys = {"input.chat": True, "decode.max_new_tokens": 9, "packing.max_num_seqs": 2, "device": "cpu", "draft": "none"}
    rows = {"prompt": ["Say it", "Say it"], "adapter": ["math", None]}

    def turns(model: dict[str, Any], rows: dict[str, Any]) -> list[Any]:
        with batchspec.Engine({"model.path": str(base), **model, **keys}) as engine:
            frame = engine.converse(
                rows, lambda turn: [*turn.messages, {"role": "user", "content": "more"}] * (turn.number < 2) or None
            )
            return frame["token_ids"].to_list()

    both = turns({"model.adapters": {k: str(v) for k, v in folders.items()}}, rows)
    merged = turns({"model.adapter": str(folders["math"])}, {"prompt": ["Say it"]})
    assert both == [*merged, *turns({}, {"prompt": ["Say it"]})]


@pytest.mark.usefixtures("quick")
def test_a_job_over_fp8_weights_has_the_answers_of_the_plain_model_with_the_adapter_merged(tmp_path: Path) -> None:
    """Every row has the adapter without a column; shared prefixes and scales of an e4m3 cache are those of the adapted model."""
    fp8, plain = make_fp8(tmp_path, "qwen3")
    folder = make_adapter(tmp_path / "adapter", plain, ["q_proj", "k_proj", "gate_proj", "down_proj"])
    for model in (fp8, plain):
        make_tokenizer(model)
    pl.DataFrame({"prompt": [f"Say word{i} again and again" for i in range(5)]}).write_parquet(tmp_path / "in.parquet")
    for number, more in enumerate(([], ["cache.dtype=fp8", "cache.scales=calibrate"])):
        found = []
        for model in (fp8, plain):
            out = tmp_path / f"{model.name}{number}"
            words_ = words(
                model, tmp_path / "in.parquet", out, f"model.adapter={folder}", "model.dtype=float64", "draft=lookup", *more
            )
            assert run.main(words_) == 0
            found.append(answers(out))
        assert found[0].equals(found[1])
    assert run.main(words(fp8, tmp_path / "in.parquet", tmp_path / "base", "model.dtype=float64", "draft=lookup")) == 0
    assert not answers(tmp_path / "base").equals(answers(tmp_path / "fp80"))


# --- what it costs


def test_the_adapter_stacks_have_the_size_of_the_shape_and_plan_counts_them(
    base: Path, folders: dict[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, adapters = opened(base, folders)
    stacks = adapters.load(spec, dtype=torch.float32, device=CPU)
    in_memory = sum(weights.a.nbytes + weights.b.nbytes for weights in stacks._weights.values())
    assert spec.lora_bytes(torch.float32) == in_memory
    assert spec.weight_bytes(torch.float32) == load_spec(base).weight_bytes(torch.float32) + in_memory
    assert read_bytes(spec, torch.float32, 8) == read_bytes(load_spec(base), torch.float32, 8) + in_memory
    assert read_bytes(spec, torch.float32, 1) == read_bytes(load_spec(base), torch.float32, 1) + in_memory / 2  # of one row
    shape: dict[str, Any] = {"dtype": torch.float32, "rows": 8, "context_tokens": 99, "tokens_per_row": 2}
    assert round_seconds(spec, H200, **shape) > round_seconds(load_spec(base), H200, **shape)
    sizes: dict[str, Any] = {"slots": 8, "num_buckets": 1, "num_verified": 2, "prefill_tokens": 999, "max_len": 99}
    more = [reserve_bytes(own, dtype=torch.float32, **sizes) for own in (spec, load_spec(base))]
    assert more[0] - more[1] == spec.lora.temporary_bytes(999) + spec.lora.temporary_bytes(24)  # type: ignore[union-attr]
    assert cli.main(["plan", *words(base, data, tmp_path / "out", named(folders))]) == 0
    assert "2 LoRA adapters" in capsys.readouterr().out


@pytest.mark.parametrize("num_adapters", [1, 4, 16, 200])
def test_intermediate_results_between_the_products_fit_the_reserved_memory(num_adapters: int) -> None:
    for (part_rows, k), rank, tokens in itertools.product(PRODUCTS.values(), RANKS, (1, 64, 256, 257, 1000, 16384)):
        lora, parts = LoraShape(num_adapters, (("a", rank),)), len(part_rows)
        programs = parts * max_tiles(tokens, num_adapters, block_of(tokens, num_adapters))
        assert 4 * num_splits(k, programs, 64) * tokens * parts * rank < lora.temporary_bytes(tokens)
        assert lora.temporary_bytes(tokens) < 60e6


def test_ranks_are_padded_by_the_largest_of_a_product(base: Path, tmp_path: Path) -> None:
    folders = {
        "a": make_adapter(tmp_path / "a", base, ["q_proj", "k_proj"], r=3),
        "b": make_adapter(tmp_path / "b", base, ["k_proj"], r=17),
    }
    spec, adapters = opened(base, folders)
    (first, *_), lora = spec.layers, spec.lora
    assert lora == LoraShape(
        2, tuple(sorted((f"model.layers.{i}.self_attn.{x}_proj", r) for i in (0, 1) for x, r in (("q", 3), ("k", 17))))
    )
    assert lora.rank_of("model.layers.0.", first.attention.qkv) == 32
    assert lora.rank_of("model.layers.0.", first.attention.out) == 0
    assert list(lora.numbers) == [0, 1, 2]
    assert list(AdapterSet(adapters.adapters[:1]).shape.numbers) == [1]
    weights = adapters.load(spec, dtype=torch.float64, device=CPU)._weights["model.layers.0.self_attn.q_proj"]
    assert not weights.a[0, :, 3:].any()
    assert not weights.b[1, :, 17:].any()
    assert weights.scales.tolist() == [[16 / 3, 16 / 3, 0.0], [0.0, 16 / 17, 0.0]]


def test_scales_of_an_e4m3_cache_cover_the_k_and_v_of_every_adapter(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    large = {name: copy.copy(folder) for name, folder in folders.items()}
    large["math"] = make_adapter(tmp_path / "large", base, ["k_proj", "v_proj"], lora_alpha=800)
    ids = [[5, 9, 20, 11, 7]]
    plain = calibrate(Target.load(base, load_spec(base), dtype=torch.float64, device=CPU), ids).values
    found = calibrate(loaded(base, large, torch.float64), ids).values
    assert bool((found >= plain).all())
    assert float((found / plain).min()) >= 2
