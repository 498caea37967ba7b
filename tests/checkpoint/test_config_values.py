"""config.json against transformers' own reading of it, and hostile values: one line, at once, never a traceback."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchspec.checkpoint import config_values
from batchspec.checkpoint.config_values import ConfigReader, read_json, shown
from batchspec.errors import CheckpointError
from batchspec.model.families import registry
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope import rope_frequencies
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from tests.helpers.attentions import attentions, windows
from tests.helpers.models import needed

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 100, "max_position_embeddings": 4096,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
NOTHING = "(missing)"


# --- the same numbers as transformers


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([NOTHING, *values])


ROPE_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "rope_type": some("default", "linear", "llama3", "yarn"),
    "type": some("default", "linear", "llama3", "yarn"),
    "rope_theta": some(5e5, 10_000, 1_000_000.0),
    "factor": some(2.0, 8, None, 1.0),
    "original_max_position_embeddings": some(512, 1024),
    "low_freq_factor": some(1.0, 2),
    "high_freq_factor": some(4.0, 3),
    "beta_fast": some(20.0, None),
    "beta_slow": some(2, None),
    "attention_factor": some(1.5, None),
    "mscale": some(0.7, None),
    "mscale_all_dim": some(1.2, 0),
    "truncate": some(True, False, None),
}
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "num_key_value_heads": some(1, 2, 4, None),
    "head_dim": some(16, 24, 32, None),
    "rms_norm_eps": some(1e-5, 1e-6),
    "rope_theta": some(20_000.0, 1_000_000),
    "original_max_position_embeddings": some(2048),
    "tie_word_embeddings": some(True, False),
    "attention_bias": some(True, False),
    "mlp_bias": some(True, False),
    "sliding_window": some(32, None),
    "use_sliding_window": some(True, False),
    "max_window_layers": some(0, 2, 28),
    "layer_types": some(["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2),
    "eos_token_id": some(2, [2, 5], None),
    "dtype": some("bfloat16", "float32"),
    "torch_dtype": some("float16", "float32"),
}


def objects(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(keys).map(lambda found: {key: value for key, value in found.items() if value is not NOTHING})


WHOLE_ROPES: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 2.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 1024, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""What each type needs: keys drawn one by one rarely make a llama3."""


def with_others(rope: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """With other values of up to three keys, or without them."""
    others = st.lists(st.sampled_from([key for key in ROPE_KEYS if key not in ("rope_type", "type")]), max_size=3, unique=True)
    return others.flatmap(lambda names: objects({
        **{key: st.just(value) for key, value in rope.items()}, **{key: ROPE_KEYS[key] for key in names},
    }))


WHOLE = st.sampled_from([{name: kind, **keys} for kind, keys in WHOLE_ROPES.items() for name in ("rope_type", "type")])
ROPES = st.one_of(st.just(NOTHING), st.none(), st.just({}), objects(ROPE_KEYS), WHOLE.flatmap(with_others))
CONFIGS = st.builds(
    lambda family, keys, scaling, parameters: {
        **LLAMA, "model_type": family, **keys,
        **({} if scaling is NOTHING else {"rope_scaling": scaling}),
        **({} if parameters is NOTHING else {"rope_parameters": parameters}),
    },
    st.sampled_from(FAMILIES), objects(KEYS), ROPES, ROPES,
)


def ours(config: dict[str, Any]) -> ModelSpec | None:
    """None: refused, in one line."""
    try:
        return read_spec(config, "config.json")
    except CheckpointError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 500
    assert said.startswith("config.json: ")
    return None


def rotary(config: dict[str, Any]) -> Any:
    """transformers' frequencies, and the config it made them from; None where it cannot."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = json.loads(json.dumps(config))
    kind = values.pop("model_type")
    if kind == "mistral" and "layer_types" in values:
        kind = "ministral"  # as AutoConfig.from_pretrained has it
    try:
        made: Any = AutoConfig.for_model(kind, **values)
        embedding = LlamaRotaryEmbedding(made)
    except Exception:  # whatever it raises, it does not read the config
        return None
    return made, embedding


YARN = {"rope_type": "yarn", **WHOLE_ROPES["yarn"]}


@pytest.mark.second
def test_what_is_read_is_what_transformers_reads() -> None:
    compared = set()

    @settings(max_examples=300)
    @example({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": YARN, "rope_theta": 2e4})
    @example({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}})
    @example({**LLAMA, "rope_scaling": {}, "rope_parameters": YARN})
    @example({**LLAMA, "rope_parameters": {**YARN, "truncate": None}, "original_max_position_embeddings": 2048})
    @example({**LLAMA, "model_type": "qwen2", "num_attention_heads": 32})
    @example({**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0})
    @example({**LLAMA, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2})
    @given(CONFIGS)
    def check(config: dict[str, Any]) -> None:
        spec, theirs = ours(config), rotary(config)
        if spec is None or theirs is None:
            return  # refusing what it reads is right where it is not supported; both directions have tests of their own below
        compare(spec, config, *theirs)
        compared.add((config["model_type"], spec.rope.type))

    check()
    assert {kind for _, kind in compared} == set(WHOLE_ROPES)
    assert {family for family, kind in compared if kind != "default"} == set(FAMILIES)


def compare(spec: ModelSpec, config: dict[str, Any], made: Any, embedding: Any) -> None:
    own = attentions(spec)[0]
    assert (own.num_heads, own.num_kv_heads) == (made.num_attention_heads, made.num_key_value_heads)
    # Qwen2 knows no head_dim of its own but takes it from the file where it is there.
    assert attentions(spec)[0].head_dim == (getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads)
    assert (spec.rms_eps, spec.tie) == (made.rms_norm_eps, made.tie_word_embeddings)
    says_length = spec.rope.type == "yarn" and spec.rope.original_is_given
    extended = int(spec.rope.factor * spec.rope.original_max_len) if says_length else 0
    assert spec.max_len == max(made.max_position_embeddings, extended)
    attention, mlp = spec.layers[0].blocks
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, GatedMlpSpec)
    assert attention.o_bias == getattr(made, "attention_bias", False) or spec.family in ("qwen2", "mistral")
    assert mlp.bias == (getattr(made, "mlp_bias", False) and spec.family == "llama")
    assert spec.dtype == str(made.dtype or "float32").removeprefix("torch.")
    ends = made.eos_token_id if "eos_token_id" in config else None
    assert spec.eos_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
    kinds = getattr(made, "layer_types", None) if spec.family != "llama" else None
    window = getattr(made, "sliding_window", None) if spec.family != "llama" else None
    kinds = kinds or ["full_attention" if window is None else "sliding_attention"] * 4
    assert windows(spec) == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    torch.testing.assert_close(rope_frequencies(spec.rope, attentions(spec)[0].head_dim), embedding.inv_freq, rtol=1e-6, atol=0)
    assert spec.rope.attention_factor == pytest.approx(embedding.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": YARN}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_usual_configs_are_read_by_both(family: str, rope: dict[str, Any]) -> None:
    config = {**LLAMA, "model_type": family, "num_key_value_heads": 2, **rope}
    assert ours(config) is not None
    assert rotary(config) is not None


def test_rope_scaling_hides_all_of_rope_parameters() -> None:
    both = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": YARN}
    spec = ours({**LLAMA, **both})
    assert spec is not None
    assert (spec.rope.type, spec.rope.factor, spec.rope.theta) == ("linear", 2.0, 10_000.0)


def test_a_rope_theta_that_rope_scaling_hides_is_refused() -> None:
    """A file of transformers 5 with the rope_scaling of a model card added: transformers would compute with theta 10000."""
    saved = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    with pytest.raises(CheckpointError, match=r"hides rope_parameters\.rope_theta=1000000\.0, and rope_theta would be 10000"):
        read_spec({**saved, "rope_scaling": scaling}, "config.json")
    for more in ({"rope_scaling": {**scaling, "rope_theta": 1e6}}, {"rope_scaling": scaling, "rope_theta": 1e6}):
        spec = ours({**saved, **more})
        assert spec is not None
        assert (spec.rope.type, spec.rope.theta) == ("yarn", 1e6)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_for_each_layer_type_is_refused_by_name(key: str) -> None:
    config = {**LLAMA, key: {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}}
    with pytest.raises(CheckpointError, match="full_attention per layer type, sliding_attention per layer type"):
        read_spec(config, "config.json")


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_keys_that_change_any_model_of_transformers_are_refused_in_every_family(family: str) -> None:
    """is_causal=false makes attention bidirectional; per_layer_config gives single layers other values of any key."""
    config = {**LLAMA, "model_type": family, "num_key_value_heads": 2, **needed(family, LLAMA["num_hidden_layers"])}
    for key, neutral in (("is_causal", True), ("is_causal", None), ("per_layer_config", None), ("per_layer_config", {})):
        assert ours({**config, key: neutral}) == ours(config) is not None
    changes: list[tuple[str, Any, str]] = [
        ("is_causal", False, "is_causal=false"),
        ("per_layer_config", {"1": {"rms_norm_eps": 0.5}}, "per_layer_config={"),
    ]
    for key, value, named in changes:
        with pytest.raises(CheckpointError, match=f"not supported: {named}"):
            read_spec({**config, key: value}, "config.json")


# --- hostile values

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 10**30, 10**4000, 1.5, -0.0, 1e300, 1e-320, math.nan, math.inf, -math.inf, "", "64", "x" * 9999,
    "\n", "\ud800", [], [1], [None], [[[]]], ["a", 1], {}, {"a": {"b": []}}, {"rope_type": []}, {"factor": "2"},
]
ODD_NUMBERS: tuple[Any, ...] = (0, -1, math.nan, math.inf, True, "1", [], 1e30, 10**400)
KINDS = ("linear", "llama3", "yarn")
ROPE_ODD = [{"rope_type": kind, key: value} for kind in KINDS for key in config_values.NUMBERS for value in ODD_NUMBERS]
OTHERS = (
    "architectures", "auto_map", "scoring_func", "rope_scaling", "rope_parameters", "hidden_act", "quantization_config",
    "logit_scale",
)
READ = sorted({*LLAMA, *KEYS, *OTHERS})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", READ)
def test_any_value_of_a_key_is_read_or_refused_in_one_line(key: str, family: str) -> None:
    for value in ODD_VALUES:
        spec = ours({**LLAMA, "model_type": family, key: value})
        assert spec is None or all(math.isfinite(number) for number in (spec.rms_eps, spec.rope.theta, spec.rope.factor))


def test_any_number_of_a_rope_is_read_or_refused_in_one_line() -> None:
    usual = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for rope in ROPE_ODD:
        spec = ours({**LLAMA, "rope_scaling": {**usual, **rope}})
        assert spec is None or rope_frequencies(spec.rope, attentions(spec)[0].head_dim).isfinite().all()


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarn", "factor": 0}, "rope_scaling.factor is 0; it must be a number in 0.01 .. 1e+06"),
        ({"rope_type": "yarn", "factor": math.nan}, "rope_scaling.factor is NaN"),
        ({"rope_type": "linear", "factor": True}, "rope_scaling.factor is true"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}, "rope_scaling.attention_factor is 0.0"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast 1 is below beta_slow 2"),
        ({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor 4 must exceed"),
        ({"rope_theta": 1.0}, "rope_scaling.rope_theta is 1.0; it must be a number in 1.01 .. 1e+15"),
        ("linear", 'rope_scaling is "linear"; it must be an object'),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(rope: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({**LLAMA, "rope_scaling": rope}, "config.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b'{"a":' * 200_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"1" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"),
        ('\ufeff{"model_type": "llama"}'.encode(), "not valid JSON"),
        (b"", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "not valid JSON"),
        (b"[]", "holds a list, not an object"),
        (b"NaN", "holds a float, not an object"),
    ],
)
def test_a_file_that_holds_no_config_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_spec(tmp_path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_too_large_or_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    os.truncate(path, config_values.MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match="more than the maximum of 100,000,000"):
        read_json(path)

    def denied(path: Path) -> BinaryIO:
        raise PermissionError(13, "Permission denied")

    path.write_text("{}")
    monkeypatch.setattr(config_values, "open_regular", denied)
    with pytest.raises(CheckpointError, match="cannot be read \\(Permission denied\\)"):
        read_json(path)


def test_a_key_under_another_name_is_read_checked_and_named_as_in_the_file() -> None:
    names = {"rms_norm_eps": "norm_eps", "intermediate_size": "block_ff_dim"}
    values = {"rms_norm_eps": 0.5, "norm_eps": 1e-3, "intermediate_size": 7}
    config = ConfigReader(values, "config.json").renamed(names)
    assert (config.number("rms_norm_eps"), config.integer("intermediate_size")) == (1e-3, 7)
    assert config.unread() == [("rms_norm_eps", 0.5)]
    assert config.replaced(rms_norm_eps=0.25).number("rms_norm_eps") == 0.25
    wrong = ConfigReader({"norm_eps": -1, "block_ff_dim": None, "intermediate_size": 7}, "config.json").renamed(names)
    assert wrong.shown("rms_norm_eps") == "norm_eps=-1"
    assert ("rms_norm_eps" in wrong, wrong.given("rms_norm_eps"), wrong.given("intermediate_size")) == (True, True, False)
    with pytest.raises(CheckpointError, match=r"config.json: norm_eps is -1; it must be a number in 1e-20 \.\. 1"):
        wrong.number("rms_norm_eps")
    with pytest.raises(CheckpointError, match=r"config.json: block_ff_dim is null; it must be an integer"):
        wrong.integer("intermediate_size")


def test_a_number_without_a_range_cannot_be_read() -> None:
    reader = ConfigReader({"new_key": 3}, "config.json")
    with pytest.raises(KeyError):
        reader.integer("new_key")
    with pytest.raises(KeyError):
        reader.number("new_key")
    with pytest.raises(KeyError):
        reader.integers("new_key")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/home/a b/.cache/hub/models--owner--my-model/snapshots/0f3/config.json", "owner/my-model/config.json"),
        ("/c/models--gpt2/snapshots/0f3", "gpt2"),
        ("/models/models--x/config.json", "/models/models--x/config.json"),
        ("model/config.json", "model/config.json"),
    ],
)
def test_a_file_of_the_hub_s_cache_goes_by_the_model_s_name(path: str, said: str) -> None:
    assert shown(Path(path)) == said
