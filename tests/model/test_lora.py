"""LoRA adapters: the merged model is transformers' with weights merged by hand; jobs with an adapter; what is refused.

The oracle adds s B A to the module of each name in transformers, in fp64, with the scale written down in the test. Adapters have
the names and keys that PEFT 0.21 saves. PEFT itself needs accelerate, so it is no part of the tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import batchspec
from batchspec import cli, run
from batchspec.commands.decode_again import other_cache
from batchspec.config.compose import compose
from batchspec.config.schema import CacheConfig
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import open_job
from batchspec.model.layers.base import Shard
from batchspec.model.lora import FILE, AdaptedWeights, adapted, open_adapter
from batchspec.model.shard import slices_of
from batchspec.model.spec import EMBEDDING, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint, taken
from tests.distributed.test_tensor_parallel import IDS, outputs
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.ranks import bits, on_ranks
from tests.helpers.runs import make_jobs_quick, make_prompts
from tests.model.test_dense_families import MODELS
from tests.model.test_target import oracle, prompts
from tests.model.test_target import run as logits_of

CPU = torch.device("cpu")
PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "peft_version": "0.21.2", "base_model_name_or_path": "some/base",
    "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "bias": "none", "use_rslora": False, "use_dora": False, "lora_bias": False,
    "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True, "modules_to_save": None, "loftq_config": {},
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layers_pattern": None, "exclude_modules": None,
    "megatron_core": "megatron.core", "megatron_config": None, "target_parameters": None, "qalora_group_size": 16,
}


def make_adapter(folder: Path, base: Path, targets: list[str], *, seed: int = 0, **config: Any) -> Path:
    """A random adapter of all modules of the checkpoint whose last part is one of `targets`; rank_pattern by last part."""
    shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in load_file(base / "model.safetensors").items()}
    modules = [name for name in shapes if name.rpartition(".")[2] in targets]
    values = {**CONFIG, "target_modules": targets, **config}
    noise, tensors = torch.Generator().manual_seed(seed), {}
    for module in sorted(modules):
        rank = values["rank_pattern"].get(module.rpartition(".")[2], values["r"])
        (rows, k), name = shapes[module], PREFIX + module
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, k, generator=noise) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=noise) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def products(adapter: Path, scales: Mapping[str, float]) -> dict[str, Tensor]:
    """fp64 s B A by module, s by the module's last part."""
    tensors = load_file(adapter / FILE)
    found = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight").removeprefix(PREFIX)
            b = tensors[name.replace("lora_A", "lora_B")]
            found[module] = scales[module.rpartition(".")[2]] * (b.double() @ tensors[name].double())
    return found


def loaded(base: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> Target:
    spec = load_spec(base)
    own = None if adapter is None else open_adapter(str(adapter), spec)
    return Target.load(base, spec, dtype=dtype, device=CPU, adapter=own)


RECURRENT: dict[str, Any] = {
    "full_attention_interval": 2, "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 10, "linear_value_head_dim": 14, "initializer_range": 0.1,
}
OF_RECURRENT = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"]
"""Projections of both kinds of layers."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "llama": ("llama", {}, {}, {"q_proj": 2.0, "v_proj": 2.0, "down_proj": 2.0}),
    "tied": ("llama", {"tie_word_embeddings": True}, {"r": 4, "lora_alpha": 2}, {"k_proj": 0.5, "gate_proj": 0.5}),
    "rslora": ("qwen3", {}, {"use_rslora": True, "r": 16, "lora_alpha": 8}, {"q_proj": 2.0, "up_proj": 2.0}),
    "patterns": (
        "llama", {}, {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 4, r"mlp\..*": 24}},
        {"q_proj": 2.0, "k_proj": 8.0, "o_proj": 0.5, "up_proj": 3.0},
    ),
    "phi3": (*MODELS["phi3 window"], {}, {"qkv_proj": 2.0, "gate_up_proj": 2.0}),
    "attention beside experts": ("mixtral", {"num_local_experts": 4}, {}, {"q_proj": 2.0, "o_proj": 2.0}),
    "recurrent": ("qwen3_5_text", RECURRENT, {}, dict.fromkeys(OF_RECURRENT, 2.0)),
    "lm_head": ("llama", {"tie_word_embeddings": False}, {}, {"lm_head": 2.0}),
}
"""Family, its keys, the adapter's keys, and the scale of each module: alpha / r or alpha / sqrt(r)."""


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_with_merged_weights(name: str, tmp_path: Path) -> None:
    family, shape, config, scales = CASES[name]
    base = make_checkpoint(tmp_path / "base", family, num_hidden_layers=2, **shape)
    adapter = make_adapter(tmp_path / "adapter", base, list(scales), **config)
    model, (ids,) = oracle(base), prompts([50])
    added = products(adapter, scales)
    assert len(added) == {"lm_head": 1, "recurrent": 3 + 2 + 2 * 2}.get(name, 2 * len(scales))
    with torch.inference_mode():
        plain = model(torch.tensor([ids])).logits[0]
        for module, delta in added.items():
            weight = model.get_submodule(module).weight
            weight.copy_(weight.double() + delta)
        expected = model(torch.tensor([ids])).logits[0]
    assert float((expected - plain).abs().max()) > 0.1
    target = loaded(base, adapter)
    torch.testing.assert_close(logits_of(target, ids)[0], expected, atol=1e-4, rtol=0)
    assert torch.equal(target.embedding, loaded(base, None).embedding)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_is_rounded_once(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a file in fp32 too, in a model of bf16: W is not rounded before the product is added."""
    base = make_checkpoint(tmp_path / "base", "llama", dtype=stored, num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "adapter", base, ["q_proj"])
    spec, name = load_spec(base), "model.layers.0.self_attn.q_proj"
    weight = load_file(base / "model.safetensors")[f"{name}.weight"]
    expected = weight.double() + products(adapter, {"q_proj": 2.0})[name]
    with Checkpoint(base, spec, dtype=dtype, device=CPU) as source:
        merged = AdaptedWeights(source, open_adapter(str(adapter), spec), spec)
        for found in (merged.tensor(f"{name}.weight"), merged.stored(f"{name}.weight")):
            assert found.dtype is dtype
            if dtype is torch.bfloat16:
                assert float((found != expected.float().bfloat16()).double().mean()) < 0.002  # sums in another order
                assert float((found != (weight.bfloat16() + (expected - weight).bfloat16())).double().mean()) > 0.05
            else:
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-15 if dtype is torch.float64 else 1e-6)
        assert torch.equal(merged.tensor(EMBEDDING), source.tensor(EMBEDDING))
        assert torch.equal(merged.stored("model.layers.0.mlp.up_proj.weight"), source.stored("model.layers.0.mlp.up_proj.weight"))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "k_proj", "o_proj", "down_proj", "lm_head"]), ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("qwen3_5_text", OF_RECURRENT),
    ],
)
def test_two_ranks_have_the_parts_of_the_merged_weights_and_its_outputs(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    shape = RECURRENT if family == "qwen3_5_text" else {}
    base = make_checkpoint(tmp_path / "base", family, dtype=torch.float64, num_hidden_layers=2, **shape)
    path, spec = str(make_adapter(tmp_path / "adapter", base, targets)), load_spec(base)
    with Checkpoint(base, spec, dtype=torch.float64, device=CPU) as source:
        merged = adapted(source, open_adapter(path, spec), spec)
        whole = {name: merged.tensor(name) for name in open_adapter(path, spec).deltas}
    assert len(whole) == len(load_file(tmp_path / "adapter" / FILE)) // 2
    for rank in range(2):
        part = spec.sharded(Shard(rank, 2))
        adapter, slices = open_adapter(path, part), slices_of(part)
        assert slices is not None
        with Checkpoint(base, part, dtype=torch.float64, device=CPU) as source:
            parts = adapted(source, adapter, part)
            for name, tensor in whole.items():
                assert slices[name]
                assert bits(parts.tensor(name)) == bits(taken(tensor, slices[name])), name

    def of_rank(ranks: Any) -> dict[str, Tensor]:
        part = spec.sharded(Shard(ranks.rank, ranks.ranks))
        own = open_adapter(path, part)
        return outputs(Target.load(base, part, dtype=torch.float64, device=CPU, ranks=ranks, adapter=own), IDS)

    alone = outputs(loaded(base, Path(path), torch.float64), IDS)
    for found in on_ranks(2, of_rank):
        torch.testing.assert_close(found["logits"], alone["logits"], rtol=1e-10, atol=1e-10)


# --- what is refused


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("base"), "llama", dtype=torch.float64, num_hidden_layers=2)
    return make_tokenizer(folder)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), base, ["q_proj", "up_proj"])


def refused(folder: Path, base: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_adapter(str(folder), load_spec(base))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora=true is not supported; merge it with PEFT"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save=["lm_head"] is not supported'),
        ({"bias": "lora_only"}, 'bias="lora_only" is not supported'),
        ({"lora_bias": True}, "lora_bias=true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=true"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters="),
        ({"a_key_of_tomorrow": 3}, "a_key_of_tomorrow=3 is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, 'init_lora_weights="pissa_niter_16" changed the base model'),
        ({"peft_type": "IA3"}, 'peft_type="IA3" is not supported, LORA is'),
        ({"r": 0}, "r is 0; it must be an integer in 1"),
        ({"lora_alpha": "16"}, 'lora_alpha is "16"; it must be a number'),
        ({"lora_alpha": None}, "lora_alpha is null; it must be a number"),
        ({"target_modules": None}, "target_modules=null names no module"),
        ({"target_modules": "("}, "target_modules=\"(\": '(' is not a regular expression"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern={\"(\": 3}: '(' is not a regular expression"),
        ({"rank_pattern": {"q_proj": "3"}}, "rank_pattern 'q_proj': r is \"3\""),
        ({"alpha_pattern": {"q_proj": []}}, "alpha_pattern 'q_proj': lora_alpha is []"),
        ({"alpha_pattern": 5}, "alpha_pattern is 5; it must be an object"),
        ({"rank_pattern": {"up_proj": 4}}, "is [8, 64], and rank 4 by adapter_config.json and the model need [4, 64]"),
        ({"target_modules": ["q_proj"]}, "2 modules that target_modules of adapter_config.json does not name: model"),
        ({"target_modules": ["q_proj", "up_proj", "k_proj"]}, "2 modules of target_modules lack in adapter_model.safetensors: m"),
    ],
)
def test_a_configuration_that_is_not_built_is_refused_by_name(
    config: dict[str, Any], named: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "other")
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    assert named in refused(folder, base)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.(q|up)_proj"}, {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "up_proj", "k_proj"], "exclude_modules": ["k_proj"]}, {"init_lora_weights": "gaussian"},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
    ],
)
def test_keys_that_change_nothing_of_these_weights_are_read(
    config: dict[str, Any], base: Path, adapter: Path, tmp_path: Path
) -> None:
    folder, spec = shutil.copytree(adapter, tmp_path / "other"), load_spec(base)
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    assert open_adapter(str(folder), spec).fingerprint == open_adapter(str(adapter), spec).fingerprint


Q_A, Q_B = (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": (8, 320)}, "1 tensors are not lora_A or lora_B of a projection: base"),
        ({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector": (64,)}, "DoRA, biases and modules saved whole are n"),
        ({f"{PREFIX}lm_head.weight": (320, 64)}, "base_model.model.lm_head.weight; embeddings"),
        ({f"{PREFIX}model.layers.9.self_attn.q_proj.lora_{x}.weight": (8, 8) for x in "AB"},
         "1 modules are not projections of the model: model.layers.9.self_attn.q_proj; give the adapter's own base model "
         "(adapter_config.json says 'some/base')"),
        ({Q_B: None}, f"{Q_B} is missing"),
        ({Q_A: (8, 60)}, f"{Q_A} is [8, 60], and rank 8"),
        ({Q_B: (64, 4)}, f"{Q_B} is [64, 4], and rank 8"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    change: dict[str, tuple[int, ...] | None], named: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "other")
    tensors = load_file(folder / FILE) | {name: torch.zeros(shape or ()) for name, shape in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if change.get(name, ()) is not None}, folder / FILE)
    assert named in refused(folder, base)


def test_missing_files_and_files_that_are_not_safetensors_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "model.adapter=owner/name: no such folder; give the folder of a PEFT LoRA adapter" in refused(Path("owner/name"), base)
    assert "adapter_config.json: no such file" in refused(base, base)
    folder = shutil.copytree(adapter, tmp_path / "other")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    assert "cut off" in refused(folder, base)
    (folder / FILE).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle; save the adapter again as safetensors" in refused(folder, base)
    save_file({name: tensor.int() for name, tensor in load_file(adapter / FILE).items()}, folder / FILE)
    assert "is I32; F64, F32, F16, BF16 are supported" in refused(folder, base)


def test_a_file_that_changes_after_it_was_checked_is_not_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    folder, spec = shutil.copytree(adapter, tmp_path / "other"), load_spec(base)
    opened = open_adapter(str(folder), spec)
    save_file({name: 2 * tensor for name, tensor in load_file(folder / FILE).items()}, folder / FILE)
    with pytest.raises(CheckpointError, match="changed since this run checked it"):
        Target.load(base, spec, dtype=torch.float64, device=CPU, adapter=opened)


def test_experts_tied_heads_and_large_ranks_of_quantised_weights_are_refused(base: Path, tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", "llama", num_hidden_layers=1, tie_word_embeddings=True)
    folder = make_adapter(tmp_path / "of_head", base, ["lm_head"])
    assert "lm_head has an adapter, and it is the embedding too (tie_word_embeddings=true)" in refused(folder, tied)
    mixtral = make_checkpoint(tmp_path / "mixtral", "mixtral", num_hidden_layers=1, num_local_experts=4)
    folder = make_adapter(tmp_path / "of_experts", mixtral, ["w1"])
    assert "w1" in refused(folder, mixtral)
    assert "adapters of MoE experts are not supported" in refused(folder, mixtral)
    config = json.loads((base / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8/config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    folder = make_adapter(tmp_path / "of_fp8", base, ["q_proj"], r=65)
    said = refused(folder, tmp_path / "fp8")
    assert "q_proj has rank 65, above 64, the limit of adapters that cannot be merged into the weights (model.adapters, " in said


# --- jobs


def merged_checkpoint(base: Path, adapter: Path, folder: Path) -> Path:
    """The base model with the adapter's products added by plain torch in fp64."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for module, delta in products(adapter, dict.fromkeys(("q_proj", "up_proj"), 2.0)).items():
        tensors[f"{module}.weight"] += delta
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data/*.parquet").select("request_id", "status", "completion", "token_ids")


@pytest.mark.second
def test_a_job_with_an_adapter_is_that_of_the_merged_model_and_resumes_with_this_adapter_alone(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_jobs_quick(monkeypatch)
    data = make_prompts(tmp_path / "prompts.parquet", 6)

    def words(model: Path, out: str, *more: str) -> list[str]:
        shape = ["packing.max_num_seqs=2", "decode.max_new_tokens=12", "input.chat=true", "draft=lookup", "device=cpu"]
        return [f"model.path={model}", f"input.path={data}", f"output.dir={tmp_path / out}", *shape, *more]

    own = f"model.adapter={adapter}"
    assert run.main(words(base, "own", own)) == 0
    assert run.main(words(merged_checkpoint(base, adapter, tmp_path / "model"), "merged")) == 0
    assert run.main(words(base, "plain")) == 0
    assert answers(tmp_path / "own").equals(answers(tmp_path / "merged"))
    assert not answers(tmp_path / "own").equals(answers(tmp_path / "plain"))

    card = (tmp_path / "own/README.md").read_text()
    digest = open_adapter(str(adapter), load_spec(base)).digest
    assert f"| LoRA adapter | `{adapter.name}`, of all rows (adapter_model.safetensors: sha256 {digest}) |" in card
    assert str(adapter) not in card
    assert "LoRA" not in (tmp_path / "plain/README.md").read_text()

    job = open_job(compose(words(base, "own", own)))
    assert other_cache(job) == CacheConfig(dtype="fp8", scales="calibrate")

    capsys.readouterr()
    moved = shutil.copytree(adapter, tmp_path / "moved")
    assert run.main(words(base, "own", f"model.adapter={moved}")) == 0
    assert "already complete" in capsys.readouterr().err
    other = make_adapter(tmp_path / "other", base, ["q_proj", "up_proj"], seed=1)
    values = json.loads((adapter / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**values, "lora_alpha": 17}))
    for more in ([f"model.adapter={other}"], [f"model.adapter={moved}"], []):
        assert run.main(words(base, "own", *more)) == 2
        assert "holds another job (model.adapter: " in capsys.readouterr().err
    assert run.main(words(base, "plain", own)) == 2
    assert "model.adapter: null -> " in capsys.readouterr().err

    (moved / "adapter_config.json").write_text(json.dumps({**values, "use_dora": True}))
    for command in ("run", "plan"):
        assert cli.main([command, *words(base, "new", f"model.adapter={moved}")]) == 2
        assert "adapter_config.json: use_dora=true is not supported" in capsys.readouterr().err
    assert cli.main(["plan", *words(base, "new", own)]) == 0
    assert run.main(words(base, "new", own, "model.load_format=dummy")) == 2
    assert "model.load_format=dummy has no weights to merge it into" in capsys.readouterr().err
    assert run.main(words(base, "new", own, "cache.dtype=fp8")) == 2
    assert "with cache.dtype=fp8 needs cache.scales=calibrate" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert cli.main(["plan", *words(base, "new", own, "cache.dtype=fp8", "cache.scales=calibrate")]) == 0


@pytest.mark.second
def test_new_weights_of_a_warm_engine_are_merged_with_its_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = {
        name: 1.25 * tensor if "proj" in name else tensor for name, tensor in load_file(base / "model.safetensors").items()
    }
    other = shutil.copytree(base, tmp_path / "other")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    rows = {"prompt": ["Say it again", "and again"]}
    keys = {"input.chat": True, "decode.max_new_tokens": 12, "packing.max_num_seqs": 2, "device": "cpu", "draft": "none"}

    def tokens(engine: batchspec.Engine) -> list[Any]:
        return engine.generate(rows)["token_ids"].to_list()

    with batchspec.Engine({"model.path": str(base), "model.adapter": str(adapter), **keys}) as engine:
        before = tokens(engine)
        engine.load_weights(other)
        swapped = tokens(engine)
        engine.load_weights(load_file(base / "model.safetensors"))
        assert tokens(engine) == before
    with batchspec.Engine({"model.path": str(merged_checkpoint(other, adapter, tmp_path / "merged")), **keys}) as engine:
        assert tokens(engine) == swapped
    assert swapped != before
