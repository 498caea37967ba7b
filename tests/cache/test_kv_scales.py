"""Scales of an e4m3 K/V cache: read from a checkpoint or calibrated, kept by the job, the same in every run of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import run
from batchspec.cache.groups import KVGroups
from batchspec.cache.layer_state import LayerState
from batchspec.cache.pages import KVCache
from batchspec.commands import verify
from batchspec.commands.verify_kv import compare_kv, divergence
from batchspec.config.compose import compose
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.run_folder import KV_SCALES
from batchspec.errors import CheckpointError, ConfigError, OutputError
from batchspec.job.prepare import open_job
from batchspec.kernels.common.card import assumed
from batchspec.model.kv_calibration import MARGIN, MAX_TOKENS, calibrate, calibration_prompts
from batchspec.model.layers.attention.kv_layout import KVLayout, LayerKV
from batchspec.model.layers.attention.kv_scales import KVScales, checkpoint_scales
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.packing.cost import kv_read_bytes
from batchspec.packing.kv_memory import KVMemory
from batchspec.text.tokenizer import Tokenizer
from batchspec.tuning.cards import known_card
from tests.helpers.attentions import attentions
from tests.helpers.engines import DEVICE, VOCAB, full_logits, in_e4m3, tiny_target, uneven_target
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.stand_ins import LLAMA_8B
from tests.model.test_mamba2_families import nemotron


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


def with_scales(model: Path, folder: Path, scales: dict[str, Any]) -> Path:
    """The model, with further tensors among its weights."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.as_tensor(value) for name, value in scales.items()}, folder / "model.safetensors")
    return folder


def names(model: Path, k: str, v: str) -> dict[str, Any]:
    """The two of every layer, as one number each."""
    layers = load_spec(model).num_layers
    return {f"model.layers.{i}.self_attn.{name}": size * (i + 1) for i in range(layers) for name, size in ((k, 0.25), (v, 0.5))}


def test_a_layout_counts_one_byte_a_number() -> None:
    plain, fp8 = (LLAMA_8B if kind == "plain" else LLAMA_8B.with_fp8_kv() for kind in ("plain", "fp8"))
    assert fp8.page_formats(torch.bfloat16, 16)[0] == KVLayout(
        dtype=torch.bfloat16, fp8=True, num_kv_heads=8, head_dim=128, page_size=16
    )
    assert 2 * fp8.page_formats(torch.bfloat16, 16)[0].page_bytes == plain.page_formats(torch.bfloat16, 16)[0].page_bytes
    read = [kv_read_bytes(spec, dtype=torch.bfloat16, rows=8, context_tokens=100, tokens_per_row=4) for spec in (plain, fp8)]
    assert read[0] == 2 * read[1]
    sizes = {"page_size": 16, "max_len": 512, "max_tokens": 512, "lookahead": 4, "pass_tokens": 512, "num_verified": 3}
    memory = [KVMemory.of(spec, torch.bfloat16, (), **sizes) for spec in (plain, fp8)]
    assert memory[1].rows(10**10, 400) >= 1.9 * memory[0].rows(10**10, 400)
    head = (LayerState(plain.page_formats(torch.bfloat16, 16)[0]),)  # a drafter's layer keeps its own layout
    assert KVMemory.of(fp8, torch.bfloat16, head, **sizes).page_bytes == (34 * memory[1].page_bytes[0] // 32,)
    assert fp8.page_formats(torch.bfloat16, 16)[0].allocate(1, 2, torch.device("cpu")).dtype is torch.float8_e4m3fn


def test_a_head_s_own_layers_may_be_in_e4m3_alone() -> None:
    """Their scales are 1; the target's layers are what its own layout says."""
    plain = KVLayout(dtype=torch.bfloat16, num_kv_heads=2, head_dim=8, page_size=4)
    for layout in (plain, replace(plain, fp8=True)):
        scales = [torch.full((2, 2), 0.5)] if layout.fp8 else None
        cache = KVCache.allocate(
            [LayerState(layout)], [LayerState(replace(plain, fp8=True))] * 2, groups=KVGroups.single(1), page_size=4,
            num_pages=(3,), device=torch.device("cpu"), scales=scales,
        )
        target, *heads = (LayerKV.of(own) for own in cache.layers)
        assert target.pages.dtype is layout.stored
        assert target.scales is None or target.scales.eq(0.5).all()
        for kv in heads:
            assert kv.pages.dtype is torch.float8_e4m3fn
            assert kv.scales is not None
            assert torch.equal(kv.scales, torch.ones(2, 2))
            kv.write(torch.full((1, 2, 8), 1.0625), torch.full((1, 2, 8), -3e4), torch.tensor([5]))
            k, v = kv.read_slots(torch.tensor([5]))
            assert k.eq(1).all()
            assert v.eq(-448).all()


@pytest.mark.parametrize(
    ("k", "v"),
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
)
def test_scales_of_a_tensor_count_for_all_heads(model: Path, k: str, v: str, tmp_path: Path) -> None:
    found = checkpoint_scales(with_scales(model, tmp_path / "m", names(model, k, v)), load_spec(model))
    assert found is not None
    assert found.values[:, 0].unique(dim=1).flatten().tolist() == [0.25 * (i + 1) for i in range(len(found.values))]
    assert torch.equal(found.values[:, 1], 2 * found.values[:, 0])


def test_scales_are_named_after_the_attention_of_the_family(tmp_path: Path) -> None:
    """Nemotron-H calls every block `mixer`, and its files begin names with `backbone.`."""
    family, config = nemotron("M-*")
    hybrid = make_checkpoint(tmp_path / "plain", family, vocab=64, **config)
    scales = {f"backbone.layers.2.mixer.{part}_proj.{part}_scale": size for part, size in (("k", 0.25), ("v", 0.5))}
    found = checkpoint_scales(with_scales(hybrid, tmp_path / "scaled", scales), load_spec(hybrid))
    assert found is not None
    assert found.values[:, :, 0].tolist() == [[0.25, 0.5]]
    with pytest.raises(CheckpointError, match=r"1 of 2 K/V scales are missing, model\.layers\.2\.mixer\.v_scale among them"):
        checkpoint_scales(with_scales(hybrid, tmp_path / "half", dict([*scales.items()][:1])), load_spec(hybrid))


def test_scales_of_heads_are_kept_apart(model: Path, tmp_path: Path) -> None:
    heads = attentions(load_spec(model))[0].num_kv_heads
    of_heads = {name: torch.arange(1.0, heads + 1).view(heads, 1, 1) for name in names(model, "k_scale", "v_scale")}
    found = checkpoint_scales(with_scales(model, tmp_path / "m", of_heads), load_spec(model))
    assert found is not None
    assert found.values[0, 0].tolist() == list(range(1, heads + 1))


def test_a_checkpoint_without_scales_has_none(model: Path) -> None:
    assert checkpoint_scales(model, load_spec(model)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.self_attn.k_scale": None}, r"1 of \d+ K/V scales are missing, model.layers.0.self_attn.k_scale among"),
        ({"model.layers.0.self_attn.k_scale": 0.0}, "holds 0; scales must be positive"),
        ({"model.layers.0.self_attn.v_scale": float("nan")}, "holds nan"),
        ({"model.layers.0.self_attn.v_scale": torch.ones(7)}, r"v_scale is \[7\]; it must be one number, or one for each of"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(change: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    scales = {name: value for name, value in (names(model, "k_scale", "v_scale") | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        checkpoint_scales(with_scales(model, tmp_path / "m", scales), load_spec(model))


def test_calibration_leaves_a_margin_over_the_largest_number_of_each_head() -> None:
    target = tiny_target()
    scales = calibrate(target, iter([[1, 2, 3, 4, 5] * 6, [7, 8, 9]])).values
    assert scales.shape == (2, 2, 2)
    assert torch.equal(scales.log2(), scales.log2().round())
    again = calibrate(target, iter([[7, 8, 9], [1, 2, 3, 4, 5] * 6])).values
    assert torch.equal(scales, again)
    assert bool((calibrate(target, iter([[1]])).values <= scales).all())
    quantised = in_e4m3(target)
    quantised.use_kv_scales(scales)
    near = (full_logits(quantised, list(range(20))) - full_logits(target, list(range(20)))).abs().max()
    quantised.use_kv_scales(scales / 2**10)  # everything saturates
    far = (full_logits(quantised, list(range(20))) - full_logits(target, list(range(20)))).abs().max()
    assert 0 < near < far / 3
    assert MARGIN >= 2**0.5  # what a rotation may add


def test_layers_with_fewer_heads_than_others_have_scales_of_their_own_alone() -> None:
    target = uneven_target(5)
    scales = calibrate(target, iter([[1, 2, 3, 4, 5] * 6]))
    assert scales.values.shape == (4, 2, 2)
    assert scales.values[1::2, :, 1].eq(1).all()
    quantised = in_e4m3(target)
    quantised.use_kv_scales(scales.values)
    assert quantised.kv_scales is not None
    assert [tuple(own.shape) for own in quantised.kv_scales] == [(2, 2), (2, 1), (2, 2), (2, 1)]
    assert torch.equal(KVScales.from_json(scales.to_json(), target.spec, "here").values, scales.values)


def test_numbers_that_are_not_finite_hide_no_others_from_calibration() -> None:
    target, usual = Target.load(Path(), tiny_target().spec, dtype=torch.float64, device=DEVICE, dummy=True), [1, 2, 3, 4, 5] * 6
    target.embedding[9] = torch.nan
    for prompts in ([usual, [9, 9]], [[9, 9], usual]):
        assert torch.equal(calibrate(target, iter(prompts)).values, calibrate(tiny_target(), iter([usual])).values)


def test_calibration_reads_text_chats_and_the_whole_vocabulary(model: Path) -> None:
    tokenizer, vocab = Tokenizer(model), load_spec(model).vocab_size
    prompts = list(calibration_prompts(tokenizer, vocab))
    assert prompts == list(calibration_prompts(Tokenizer(model), vocab))
    assert len(prompts) >= 8
    assert all(0 < len(ids) <= MAX_TOKENS and max(ids) < vocab for ids in prompts)
    (alone,) = calibration_prompts(None, VOCAB)
    assert set(alone) == set(range(VOCAB))


def test_a_file_of_scales_keeps_every_bit_and_shows_damage() -> None:
    spec = tiny_target().spec
    scales = KVScales(torch.rand(2, 2, 2))
    data = scales.to_json()
    again = KVScales.from_json(data, spec, "here")
    assert torch.equal(again.values, scales.values)
    assert again.fingerprint == scales.fingerprint
    changed = json.loads(data)
    changed["scales"][0][0][0] *= 2
    for wrong in (b"", b"[]", json.dumps(changed).encode()):
        with pytest.raises(OutputError, match="here is damaged"):
            KVScales.from_json(wrong, spec, "here")
    with pytest.raises(OutputError, match=r"scales of shape \[1, 2, 2\]"):
        KVScales.from_json(KVScales(torch.ones(1, 2, 2)).to_json(), spec, "here")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": f"q{i}", "prompt": "Say the words " + " ".join(f"word{(i * k) % 7}" for k in range(i % 5))} for i in range(12)]
    pl.DataFrame(rows).write_parquet(tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def job(model: Path, data: Path, out: Path, *more: str) -> int:
    return run.main(
        [
            f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=3",
            "output.token_ids=true", "decode.max_new_tokens=12", "packing.max_num_seqs=4", "decode.ignore_eos=true", *more,
        ]
    )


def tokens(out: Path) -> list[list[int]]:
    return pl.read_parquet(out / "data").sort("row_index")["token_ids"].to_list()


@pytest.mark.second
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_a_checkpoint_whose_k_and_v_alone_are_quantised_runs_with_its_scales(
    file: str, model: Path, data: Path, tmp_path: Path
) -> None:
    scaled = with_scales(model, tmp_path / "scaled", names(model, "k_scale", "v_scale"))
    kv_only = with_scales(model, tmp_path / "kv_only", names(model, "k_scale", "v_scale"))
    if file == "config.json":
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        quantisation = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
        content = json.loads((model / file).read_text()) | {"quantization_config": quantisation}
    else:
        content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (kv_only / file).write_text(json.dumps(content))
    for folder in (scaled, kv_only):
        assert job(folder, data, tmp_path / f"out of {folder.name}", "cache.dtype=fp8", "cache.scales=checkpoint") == 0
    assert tokens(tmp_path / "out of kv_only") == tokens(tmp_path / "out of scaled")


@pytest.mark.second
def test_speculation_and_scarce_pages_change_no_token_of_a_job(model: Path, data: Path, tmp_path: Path) -> None:
    assert job(model, data, tmp_path / "plain", "draft=none", "cache.dtype=fp8", "packing.max_num_seqs=1") == 0
    assert job(model, data, tmp_path / "drafts", "draft=lookup", "cache.dtype=fp8", "packing.pages=9") == 0
    assert tokens(tmp_path / "plain") == tokens(tmp_path / "drafts")
    kept = [(tmp_path / name / KV_SCALES).read_bytes() for name in ("plain", "drafts")]
    assert kept[0] == kept[1]


@pytest.mark.second
def test_a_resumed_job_uses_the_scales_that_it_began_with(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert job(model, data, out, "cache.dtype=fp8") == 0
    whole, kept = tokens(out), KVScales.from_json((out / KV_SCALES).read_bytes(), load_spec(model), "")
    coarse = KVScales(kept.values * 2**12)  # as if begun with these: K and V are all but zero
    (out / KV_SCALES).write_bytes(coarse.to_json())
    for part in (out / "data").iterdir():
        part.unlink()
    assert job(model, data, out, "cache.dtype=fp8") == 0
    assert tokens(out) != whole
    assert (out / KV_SCALES).read_bytes() == coarse.to_json()


@pytest.mark.second
def test_a_job_that_lost_its_scales_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibrated anew, a machine that rounds otherwise could have others; those of a checkpoint are the same ever after."""
    out = tmp_path / "out"
    assert job(model, data, out, "cache.dtype=fp8") == 0
    whole, shards = tokens(out), sorted((out / "data").iterdir())
    shards.pop().unlink()
    (out / KV_SCALES).unlink()
    assert job(model, data, out, "cache.dtype=fp8") == OutputError.exit_code
    assert f"{KV_SCALES} is missing, and 3 shards of the job came from these" in capsys.readouterr().err
    with pytest.raises(OutputError, match="is missing"):
        verify.main([str(out)])
    for part in shards:
        part.unlink()
    assert job(model, data, out, "cache.dtype=fp8") == 0  # as after a kill between manifest and scales
    assert tokens(out) == whole
    scaled, own = with_scales(model, tmp_path / "scaled", names(model, "k_scale", "v_scale")), tmp_path / "own"
    assert job(scaled, data, own, "cache.dtype=fp8") == 0
    whole = tokens(own)
    next((own / "data").iterdir()).unlink()
    (own / KV_SCALES).unlink()
    assert job(scaled, data, own, "cache.dtype=fp8") == 0
    assert tokens(own) == whole


@pytest.mark.second
def test_other_scales_are_another_job(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    scaled = with_scales(model, tmp_path / "scaled", names(model, "k_scale", "v_scale"))
    assert job(scaled, data, out, "cache.dtype=fp8") == 0
    assert (KVScales.from_json((out / KV_SCALES).read_bytes(), load_spec(model), "").values[0, 0] == 0.25).all()
    for more, named in (
        (["cache.dtype=fp8", "cache.scales=calibrate"], 'cache.scales: "auto" -> "calibrate"'),
        ([], 'cache.dtype: "fp8" -> "auto"'),
    ):
        assert job(scaled, data, out, *more) == OutputError.exit_code
        assert named in capsys.readouterr().err
    next((out / "data").iterdir()).unlink()
    own = KVScales(torch.full_like(torch.ones(load_spec(model).num_layers, 2, attentions(load_spec(model))[0].num_kv_heads), 0.5))
    (out / KV_SCALES).write_bytes(own.to_json())
    assert job(scaled, data, out, "cache.dtype=fp8") == OutputError.exit_code
    assert "holds this job with other K/V scales (kv_scales: " in capsys.readouterr().err
    (out / KV_SCALES).write_bytes(b"{")
    assert job(scaled, data, out, "cache.dtype=fp8") == OutputError.exit_code
    assert f"{KV_SCALES} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["cache.scales=calibrate"], "cache.scales=calibrate is not used by cache.dtype=auto; set fp8 or remove the key"),
        (["cache.dtype=fp8", "cache.scales=checkpoint"], "has no K/V scales (k_scale, v_scale), which cache.scales=checkpoint"),
        (["cache.dtype=fp16"], "cache.dtype=fp16 must be one of auto, fp8"),
        (["cache.dtype=fp8", "cache.scales=checkpoint", "model.load_format=dummy"], "load_format=dummy reads no checkpoint"),
    ],
)
def test_keys_without_effect_are_refused(
    more: list[str], message: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(model, data, tmp_path / "out", *more) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gpu_without_e4m3_is_refused(model: Path, data: Path) -> None:
    for key, more in (("cache.dtype", []), ("draft.cache_dtype", ["draft=eagle3", "draft.path=head"])):
        config = compose([f"model.path={model}", f"input.path={data}", f"{key}=fp8", *more])
        refused = rf"^{key}=fp8 needs .* capability 8.9 or newer, A100-80GB has 8.0; use {key}=auto"
        with assumed(known_card("A100-80GB").card), pytest.raises(ConfigError, match=refused):
            open_job(config)


@pytest.mark.second
@pytest.mark.parametrize("ran_with", ["auto", "fp8"])
def test_verify_kv_compares_both_caches_on_the_jobs_own_tokens(
    ran_with: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for folder, dtype in ((out, ran_with), (other, {"auto": "fp8", "fp8": "auto"}[ran_with])):
        assert job(model, data, folder, "draft=none", f"cache.dtype={dtype}", "decode.temperature=1.0") == 0
    differ = sum(a != b for a, b in zip(tokens(out), tokens(other), strict=True))
    capsys.readouterr()
    assert verify.main([str(out), "--rows", "0"]) == 0  # with the job's own cache and scales
    assert "12 completions decoded again" in capsys.readouterr().out
    assert verify.main([str(out), "--rows", "0", "--kv"]) == 0
    text = capsys.readouterr().out
    names = {"auto": ("float64", "fp8"), "fp8": ("fp8", "float64")}[ran_with]
    assert f"12 completions, written with K and V in {names[0]}, decoded again with {names[1]}: {differ} differ" in text
    assert "over 144 output positions: mean" in text
    report = compare_kv(out, 4)
    assert 0 < report.mean_kl < report.largest_kl < 1


@pytest.mark.second
@pytest.mark.parametrize("wrong", [{"model.layers.0.self_attn.k_scale": None}, {"model.layers.0.self_attn.k_scale": 0.0}])
def test_verify_kv_calibrates_where_the_scales_of_the_checkpoint_cannot_be_used(
    wrong: dict[str, Any], model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job without FP8 K/V need not set the key, and a job with them gets its name in the error."""
    scales = {name: value for name, value in (names(model, "k_scale", "v_scale") | wrong).items() if value is not None}
    odd, out = with_scales(model, tmp_path / "odd", scales), tmp_path / "out"
    assert job(odd, data, out, "draft=none") == 0
    plain = compare_kv(out, 4)
    assert job(model, data, tmp_path / "plain", "draft=none") == 0
    assert plain.mean_kl == compare_kv(tmp_path / "plain", 4).mean_kl
    capsys.readouterr()
    assert verify.main([str(out), "--rows", "4", "--kv"]) == 0
    line = "the fp8 scales are calibrated: those of the checkpoint cannot be used, so a job in fp8 needs cache.scales=calibrate"
    assert line in capsys.readouterr().out
    assert verify.main([str(tmp_path / "plain"), "--rows", "4", "--kv"]) == 0
    assert line not in capsys.readouterr().out
    assert job(odd, data, tmp_path / "fp8", "cache.dtype=fp8") == CheckpointError.exit_code
    assert "set cache.scales=calibrate" in capsys.readouterr().err
    assert job(odd, data, tmp_path / "fp8", "cache.dtype=fp8", "cache.scales=calibrate") == 0


def test_scales_that_are_missing_are_named_before_a_weight_is_read(model: Path, data: Path, tmp_path: Path) -> None:
    first, *others = names(model, "k_scale", "v_scale").items()
    odd = with_scales(model, tmp_path / "odd", dict(others))
    words = [f"model.path={odd}", f"input.path={data}", "device=cpu", "cache.dtype=fp8", "decode.max_new_tokens=8"]
    with pytest.raises(CheckpointError, match=rf"1 of \d+ K/V scales are missing, {first[0]}.*set cache\.scales=calibrate"):
        open_job(compose(words))
    open_job(compose([*words, "cache.scales=calibrate"]))
    open_job(compose([*words, "model.load_format=dummy"]))


def test_the_divergence_is_that_of_the_two_distributions() -> None:
    plain, fp8 = tiny_target(), in_e4m3(tiny_target())
    prompt, output = [1, 2, 3], [4, 5, 6, 7]
    found = list(divergence(fp8, prompt, output))
    for place, value in enumerate(found):
        ids = [*prompt, *output[:place]]
        p, q = (torch.log_softmax(full_logits(target, ids), -1) for target in (plain, fp8))
        assert value == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-6, abs=1e-12)
    assert len(found) == 4
    assert list(divergence(fp8, prompt, [])) == []


@pytest.mark.second
def test_a_second_run_uses_the_scales_of_the_first(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may differ by a machine: both began with an empty folder, and made their engines before one could keep its own."""
    assert job(model, data, tmp_path / "alone", "cache.dtype=fp8") == 0
    first = KVScales(KVScales.from_json((tmp_path / "alone" / KV_SCALES).read_bytes(), load_spec(model), "").values * 2**12)
    monkeypatch.setattr(OutputFolder, "keep_kv_scales", lambda *_: first.to_json())
    assert job(model, data, tmp_path / "second", "cache.dtype=fp8") == 0
    monkeypatch.undo()
    (tmp_path / "alone" / KV_SCALES).write_bytes(first.to_json())
    for part in (tmp_path / "alone" / "data").iterdir():
        part.unlink()
    assert job(model, data, tmp_path / "alone", "cache.dtype=fp8") == 0
    assert tokens(tmp_path / "second") == tokens(tmp_path / "alone")
