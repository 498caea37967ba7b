"""Every value that cannot work is refused in one line that names the key, the value, the limit and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from batchspec.config.checks import check
from batchspec.config.compose import compose
from batchspec.config.no_effect import READ_BY
from batchspec.config.overrides import overrides_of
from batchspec.config.schema import KEYS, RunConfig
from batchspec.config.typed import from_dict, from_hydra, from_json, keys, suggest, to_json
from batchspec.config.vllm_names import NAMES, REMARKS, remark
from batchspec.errors import ConfigError


def config(**values: Any) -> RunConfig:
    """The defaults with dotted keys replaced: config(decode__n=2)."""
    made = RunConfig()
    for name, value in values.items():
        *groups, leaf = name.split("__")
        node: Any = made
        for group in groups:
            node = getattr(node, group)
        setattr(node, leaf, value)
    return made


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config(**values))
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what is saved


@pytest.mark.parametrize("text", ["${oc.env:AWS_SECRET_ACCESS_KEY}", "a ${ oc.env:X,y}", "${oc.decode:${oc.env:X}}", "${env:X}"])
@pytest.mark.parametrize("key", ["decode__thinking_closing", "input__path", "input__template_kwargs", "decode__stop"])
def test_an_interpolation_of_the_environment_is_not_saved(key: str, text: str) -> None:
    value: Any = {"input__template_kwargs": {"a": [{text: 1}]}, "decode__stop": ["x", text]}.get(key, text)
    assert "as plain text, and whatever reads the saved configuration could" in refused(**{key: value})


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "my_api_key", "DB_PASSWORD"])
def test_a_secret_of_the_environment_is_not_saved_however_it_got_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "s3cr3t/v4lu3")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "decoding")
    monkeypatch.setenv("SSH_KEY", str(tmp_path))
    message = refused(input__template_kwargs={"who": "s3cr3t/v4lu3!"})
    assert message.startswith(f"input.template_kwargs.who holds the value of the environment variable {name}")
    assert "v4lu3" not in message
    check(config(input__path="decoding.parquet"))
    check(config(input__path=f"{tmp_path}/in.parquet"))
    with pytest.raises(ConfigError, match=f"environment variable {name}"):
        compose([f"model.path=${{oc.env:{name}}}"])


def test_a_path_may_come_from_the_environment_and_is_saved_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert compose(["output.dir=${oc.env:SCRATCH}/out"]).output.dir == "/scratch/me/out"


def test_what_is_read_from_a_manifest_or_another_process_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "value")
    made = from_dict({"decode": {"stop": ["${oc.env:OTHER}", "${draft.name}", "\\${x}"]}})
    assert made.decode.stop == ["${oc.env:OTHER}", "${draft.name}", "\\${x}"]
    made.decode.stop = ["${draft.name}"]
    assert from_json(to_json(made)) == made


def test_text_that_is_no_unicode_is_not_saved() -> None:
    assert "is not valid Unicode" in refused(input__path="a\udcff.parquet")


def test_the_defaults_can_run_once_the_required_keys_are_given() -> None:
    check(RunConfig())
    with pytest.raises(ConfigError, match=r"model\.path is required; give model\.path="):
        check(RunConfig(), require=("model.path",))
    check(config(model__path="m"), require=("model.path",))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decode__regex": ""}, "decode.regex= is empty; give a regex or remove the key"),
        ({"decode__choice": [""]}, "decode.choice=[''] allows empty answers alone; give other texts or remove the key"),
        ({"decode__top_p": 1.5}, "decode.top_p=1.5 must be above 0 and at most 1; 1 is off"),
        ({"cluster__tensor_parallel": 0}, "cluster.tensor_parallel=0 must be in 1 .. 8; 1, 2, 4 or 8 GPUs for each copy of"),
        ({"cluster__tensor_parallel": 3}, "cluster.tensor_parallel=3 must be auto, 1, 2, 4 or 8; 1 is one GPU per copy of the"),
        ({"decode__top_p": 0.0}, "decode.top_p=0.0 must be above 0"),
        ({"decode__temperature": float("nan")}, "decode.temperature=nan must be in 0 .. 100"),
        ({"decode__temperature": -1.0}, "decode.temperature=-1.0"),
        ({"decode__seed": 2**63}, "must be in -2^63 .. 2^63-1"),
        ({"decode__max_new_tokens": -1}, "decode.max_new_tokens=-1 must be at least 1"),
        ({"decode__min_new_tokens": 9, "decode__max_new_tokens": 8}, "decode.min_new_tokens=9 exceeds decode.max_new_tokens=8"),
        ({"decode__max_new_tokens": 64, "model__max_len": 64}, "leaves no room for a prompt in model.max_len=64"),
        ({"decode__stop": [""]}, "empty string"),
        ({"input__path": ["a.parquet", "s3://KEY:SECRET@bucket/x"]}, "input.path holds credentials in a URL; take them out"),
        ({"output__dir": "gs://bucket/x?sas_token=SECRET"}, "output.dir holds credentials in a URL"),
        ({"decode__stop_ids": [-1]}, "decode.stop_ids=[-1]"),
        ({"model__dtype": "float8"}, "model.dtype=float8 must be one of auto, float32"),
        ({"packing__memory_gb": 0.0}, "packing.memory_gb=0.0 must be above 0; null lets the planner choose"),
        ({"packing__pages": 1}, "packing.pages=1 must be in 2 .."),
        ({"input__on_overlong": "drop"}, "input.on_overlong=drop must be one of error, truncate, skip"),
        ({"input__path": 3}, "input.path=3 must be a path"),
        ({"input__path": []}, "input.path=[] must be a path"),
        ({"output__passthrough": "id"}, "output.passthrough='id' must be all, none or a list"),
        ({"resume__retry": "errors"}, "resume.retry=errors must be one of none, error, length"),
    ],
)
def test_a_value_out_of_range_is_refused(values: dict[str, Any], said: str) -> None:
    assert said in refused(**values)


def test_a_drafter_must_have_what_it_drafts_with() -> None:
    assert refused(draft__name="hybrid").startswith("draft=hybrid needs draft.path: the folder or hub id of an EAGLE-3 head")
    assert refused(draft__name="pard").startswith("draft=pard needs draft.path: the folder or hub id of a small model")
    assert "must be one of auto, none, lookup, eagle3" in refused(draft__name="magic")


@pytest.mark.parametrize("key", READ_BY)
def test_a_key_of_another_drafter_is_refused_rather_than_ignored(key: str) -> None:
    values = {"draft.path": "head", "draft.aux_layers": "output", "draft.prompt_lookup_min": 3, "ablation.dead_positions": False}
    values |= {"draft.parallel": True, "draft.coupled": False}
    values |= {"draft.cache_dtype": "fp8", "ablation.sharded_draft": True, "draft.vocab_size": 4096}
    readers, value = READ_BY[key], values.get(key, 7)
    changes: dict[str, Any] = {key.replace(".", "__"): value}
    complete: dict[str, dict[str, Any]] = {
        "lookup": {},
        "mtp": {"draft__window": 9},
        "eagle3": {"draft__path": "head", "draft__window": 9},
        "hybrid": {"draft__path": "head", "draft__window": 9},
        "block": {"draft__path": "head", "draft__window": 9},
        "pard": {"draft__path": "small"},
        "window": {"draft__window": 9},
    }
    for name in complete.keys() - set(readers):
        said = refused(draft__name=name, **{**complete[name], **changes})
        shown = str(value).lower() if isinstance(value, bool) else value
        assert said.startswith(f"{key}={shown} is not used by draft={name}, only by draft={readers[0]}")
    for name in readers:
        needed = {"draft__tree__topk": 2} if key.startswith("draft.tree.") else {}
        check(config(draft__name=name, **complete[name] | needed | changes))


def test_a_head_has_a_checkpoint_and_a_sink_has_a_window() -> None:
    assert refused(draft__name="eagle3") == (
        "draft=eagle3 needs draft.path: the folder or hub id of an EAGLE-3 head made for the model"
    )
    check(config(draft__name="eagle3", model__load_format="dummy"))
    assert "draft=window needs draft.window" in refused(draft__name="window")
    assert "draft.sink_tokens=4 without draft.window" in refused(draft__name="eagle3", draft__path="head", draft__sink_tokens=4)
    assert "draft.window=0 must be at least 1" in refused(draft__name="eagle3", draft__path="head", draft__window=0)
    assert "draft.aux_layers=both must be one of" in refused(draft__name="eagle3", draft__path="head", draft__aux_layers="both")
    assert "draft.parallel=1 must be one of auto, true, false" in refused(
        draft__name="eagle3", draft__path="h", draft__parallel=1
    )


def test_a_draft_tree_must_be_one_that_can_be_grown_and_verified() -> None:
    tree: dict[str, Any] = {"draft__name": "eagle3", "draft__path": "head", "draft__tree__topk": 10}
    check(config(**tree, draft__num_speculative_tokens=6))
    check(config(**tree, draft__tree__depth=7, draft__tree__nodes=63))
    assert refused(**tree, draft__tree__depth=8) == (
        "draft.tree.topk=10 at 8 levels takes 70 places to grow, more than 64; lower it or draft.tree.depth"
    )
    assert "draft.tree.nodes=64 must be in 1 .. 63; a round verifies" in refused(
        **tree, draft__num_speculative_tokens=6, draft__tree__nodes=64
    )
    assert refused(**{**tree, "draft__tree__topk": 2}, draft__tree__depth=3, draft__tree__nodes=11) == (
        "draft.tree.nodes=11 exceeds the 10 nodes that draft.tree.topk=2 grows at 3 levels; lower it or remove the key"
    )
    assert "draft.tree.topk=65 must be in 1 .. 64" in refused(**{**tree, "draft__tree__topk": 65}, draft__tree__depth=1)
    assert "draft.parallel=true drafts all at once; remove one" in refused(
        **tree, draft__num_speculative_tokens=6, draft__parallel=True
    )
    assert refused(draft__name="eagle3", draft__path="head", draft__tree__depth=5) == (
        "draft.tree.depth=5 is not used with draft.tree.topk=1, a chain; set topk or remove the key"
    )
    rates = [0.6, 0.3, 0.1]
    check(config(**tree, draft__synthetic=rates, draft__tree__depth=3))
    assert "draft.num_speculative_tokens=6 needs as many" in refused(
        **tree, draft__synthetic=rates, draft__num_speculative_tokens=6
    )
    assert "draft.tree.depth=4 needs as many" in refused(**tree, draft__synthetic=rates, draft__tree__depth=4)


def test_synthetic_acceptance_must_fit_the_draft_length_and_fall() -> None:
    check(config(draft__synthetic=[0.6, 0.28, 0.12], draft__num_speculative_tokens=3))
    assert "draft.num_speculative_tokens=4 needs as many" in refused(draft__synthetic=[0.5], draft__num_speculative_tokens=4)
    assert "non-increasing" in refused(draft__synthetic=[0.1, 0.2], draft__num_speculative_tokens=2)
    assert "non-increasing" in refused(draft__synthetic=[1.2, 0.2], draft__num_speculative_tokens=2)
    assert "draft=none" in refused(draft__synthetic=[0.1], draft__num_speculative_tokens=1, draft__name="none")


def test_every_number_has_a_range_and_drafters_read_real_keys() -> None:
    known = keys()
    assert set(READ_BY) <= set(known)
    for key in known:
        value: Any = RunConfig()
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert KEYS[key].advice, key


@given(st.sampled_from([key for key, its in KEYS.items() if its.advice]), st.floats(allow_nan=True))
def test_a_range_lets_through_exactly_what_lies_in_it(key: str, value: float) -> None:
    assert (KEYS[key].violation(key, value) is None) == (KEYS[key].low <= value <= KEYS[key].high)


def test_a_typed_configuration_survives_omegaconf_and_back() -> None:
    made = config(model__path="m", input__columns={"prompt": "text"}, input__path=["a", "b"], decode__stop=["x"])
    assert from_hydra(OmegaConf.structured(made)) == made


def test_unknown_keys_and_wrong_types_name_the_key_in_one_line() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"decode": {"max_tokens": 3}},
            "decode.max_tokens is not a key of the configuration; batchspec calls it decode.max_new_tokens",
        ),
        ({"tensor_parallel_size": 2}, "batchspec calls it cluster.tensor_parallel"),
        ({"gpu_memory_utilization": 0.9}, "packing.memory_gb is the memory for K/V in GB, not a share of the GPU"),
        ({"guided_json": {}}, "guided_json is not a key of the configuration; batchspec calls it decode.schema"),
        ({"guided_json": {"type": "object"}}, "guided_json is not a key"),
        ({"decode": {"extra": {}}}, "decode.extra is not a key"),
        ({"model.path": "x"}, "model.path: a file of YAML has it as model: {path: VALUE}"),
        ({"draft.tree.topk": 2}, "draft.tree.topk: a file of YAML has it as draft: {tree: {topk: VALUE}}"),
        ({"decode": {"max_tokns": 3}}, "decode.max_tokns is not a key of the configuration; did you mean decode.max_new_tokens?"),
        ({"extra": 1}, "extra is not a key"),
        ({"decode": {"n": "two"}}, "decode.n=two must be a whole number"),
    ]
    for values, said in cases:
        with pytest.raises(ConfigError) as caught:
            from_hydra(OmegaConf.create(values))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.second
@pytest.mark.parametrize("value", [[], {}, [["a"]], {"a": [1]}, "a b", float("nan"), 10**20], ids=str)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(value: Any) -> None:
    for key in keys():
        values = value
        for part in reversed(key.split(".")):
            values = {part: values}
        said = key
        try:
            check(from_hydra(OmegaConf.create(values)))
        except ConfigError as error:
            said = str(error)
        assert key.partition(".")[0] in said, key
        assert "\n" not in said, key


def test_the_shipped_prompts_have_a_name_that_works_from_anywhere() -> None:
    made = from_hydra(OmegaConf.structured(config(input__path="pkg://demo")))
    assert made.input.path.endswith("prompts/demo.parquet")
    with pytest.raises(ConfigError, match="shipped: demo"):
        from_hydra(OmegaConf.structured(config(input__path="pkg://dmeo")))


def test_a_suggestion_finds_the_right_last_part_in_the_wrong_group() -> None:
    assert suggest("temperature", keys()) == "did you mean decode.temperature?"
    assert suggest("zzzz", keys()) == ""


def test_names_of_other_programs_lead_to_keys_that_exist() -> None:
    assert set(NAMES.values()) <= set(keys())
    assert not {*NAMES, *REMARKS} & {key.rsplit(".", 1)[-1] for key in keys()}
    assert not set(NAMES) & set(REMARKS)
    groups = "|".join({key.partition(".")[0] for key in keys()})
    named = {key for text in REMARKS.values() for key in re.findall(rf"\b(?:{groups})\.[\w.]*\w", text)}
    assert len(named) > 10
    assert named <= set(keys())


@pytest.mark.second
@pytest.mark.parametrize("name", [*NAMES, *REMARKS])
def test_a_name_of_another_program_is_answered_on_the_command_line_and_in_python(name: str) -> None:
    said = f"{name} is not a key of the configuration; {remark(name, keys())}"
    values: tuple[Any, ...] = (1, "x", {}, {"type": "object"}, [])
    for value in values:
        with pytest.raises(ConfigError) as refused:
            compose(overrides_of({name: value}))
        assert str(refused.value) == said
    with pytest.raises(ConfigError, match=re.escape(remark(name, keys()))):
        compose([f"+decode.{name}=1"])


def test_a_map_without_keys_asks_for_nothing_only_if_it_is_a_group() -> None:
    assert overrides_of({"decode": {}, "draft": {"tree": {}}, "input.columns": {}}) == ["input.columns={}"]
    wrong: tuple[dict[str, Any], ...] = ({"guided_json": {}}, {"decode": {"guided_json": {}}}, {"decode.guided_json": {}})
    for options in wrong:
        with pytest.raises(ConfigError, match=r"guided_json is not a key of .*; batchspec calls it decode\.schema"):
            compose(overrides_of(options))


def test_every_group_of_keys_refuses_attributes_it_does_not_have() -> None:
    for item in fields(RunConfig()):
        group = getattr(RunConfig(), item.name)
        if is_dataclass(group):
            with pytest.raises(AttributeError):
                group.typo = 1  # type: ignore[union-attr]


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, batchspec.config.schema, batchspec.config.compose; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
