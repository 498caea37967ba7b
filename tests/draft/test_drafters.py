"""The registry of drafters: every part of the program finds a drafter there, and a new one is a file, a conf and an entry."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
import torch

from batchspec.batch.device_batch import DeviceBatch
from batchspec.bench.engines import DRAFTS
from batchspec.cache.pages import KVCache
from batchspec.commands.planning import plan
from batchspec.config import draft_auto
from batchspec.config.checks import check
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.drafters import DRAFTERS, Entry, named
from batchspec.config.key import Key
from batchspec.config.no_effect import READ_BY
from batchspec.config.schema import KEYS, ModelConfig, RunConfig
from batchspec.draft.base import NoFeatures
from batchspec.draft.shapes import ChainShape, TreeShape
from batchspec.draft.spec import DrafterSpec, Weightless, open_drafter
from batchspec.errors import ConfigError
from batchspec.job.run_job import run_job
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, tiny_target
from tests.helpers.runs import make_model

CONF = Path(__file__).parents[2] / "conf" / "draft"
COMPLETE = {"window": {"window": 9}}


def config_of(name: str, **draft: object) -> RunConfig:
    """A config of noise weights for a drafter that needs no folder."""
    drafts = {} if name == "none" else {"num_speculative_tokens": 3}
    return RunConfig(
        model=ModelConfig(load_format="dummy"),
        draft=DraftConfig(**{"name": name, **drafts, **COMPLETE.get(name, {}), **draft}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", sorted({*named()} - {"pard", "mtp"}))  # they need a folder
def test_a_spec_predicts_the_properties_of_its_drafter_before_weights_are_read(name: str) -> None:
    target, config = tiny_target(), config_of(name)
    check(config)
    spec = open_drafter(config, target.spec)
    drafter = spec.build(spec.load(dtype=target.dtype, device=DEVICE), target, slots=2)
    assert drafter.shape == spec.shape
    assert drafter.draft_len == spec.shape.draft_len
    layers = spec.layer_states(target.dtype, 4)
    assert layers == drafter.layer_states(4)
    assert (spec.weight_bytes(dtype=target.dtype, device=target.device) > 0) == bool(layers)
    assert 0 <= spec.assumed_accepted <= 3


def test_every_drafter_has_a_conf_of_its_name_and_every_conf_a_drafter() -> None:
    names = {path.stem: re.findall("^name: (.*)$", path.read_text(), re.MULTILINE) for path in CONF.glob("*.yaml")}
    drafters = {conf: name for conf, (name,) in names.items()}
    assert set(drafters.values()) == set(DRAFTERS)
    assert all(drafters[name] == name for name in DRAFTERS)


def test_choices_and_benchmarks_are_those_of_the_registry() -> None:
    assert KEYS["draft.name"].choices == tuple(DRAFTERS)
    assert set(named()) == set(DRAFTERS) - {"auto"}
    assert set(named()) <= set(DRAFTS)
    assert "auto" not in DRAFTS
    assert {name for names in READ_BY.values() for name in names} <= set(DRAFTERS)


def test_a_corpus_is_counted_as_memory_of_the_drafters_that_keep_one() -> None:
    for name in ("lookup", "hybrid"):
        small, large = (open_drafter(config_of(name, corpus_tokens=size), tiny_target().spec) for size in (0, 1000))
        assert small.corpus_bytes() == 0
        assert large.corpus_bytes() >= 2 * 4 * 1000


def test_a_chain_and_a_tree_state_the_cost_of_a_round() -> None:
    chain, tree = ChainShape(5), TreeShape(topk=4, depth=4, nodes=9)
    assert (chain.num_verified, chain.kv_per_round, chain.num_lookahead_slots, str(chain)) == (5, 6, 0, "K=5")
    # 3 levels of 4 nodes go through the drafter: more than the 9 nodes and the newest token that the target reads.
    assert (tree.draft_len, tree.num_verified, tree.kv_per_round, tree.num_lookahead_slots) == (4, 9, 12, 10)
    assert str(tree) == "trees of 9 nodes, 4 levels"


class RepeatDrafter(NoFeatures):
    """Drafts the newest token K times."""

    name = "repeat"
    fixed_len = True

    def __init__(self, draft_len: int) -> None:
        self.draft_len = draft_len

    def propose(self, rows: DeviceBatch, draft_ids: torch.Tensor, draft_len: torch.Tensor, cache: KVCache) -> None:
        newest = rows.tokens.gather(1, (rows.num_tokens.long() - 1).clamp(min=0).unsqueeze(1))
        draft_ids.copy_(newest.expand_as(draft_ids))
        torch.mul(rows.live, draft_ids.shape[1], out=draft_len)


class RepeatSpec(Weightless):
    assumed_accepted = 0.5

    def build(self, weights: None, target: Target, *, slots: int) -> RepeatDrafter:
        return RepeatDrafter(self.config.draft.draft_len)


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that the program does not know: its module, its entry and its conf, nothing else."""
    module = ModuleType("batchspec.draft.repeat")
    module.SPEC = RepeatSpec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(DRAFTERS, "repeat", Entry())
    monkeypatch.setitem(KEYS, "draft.name", Key(choices=tuple(DRAFTERS)))
    monkeypatch.setattr(draft_auto, "option_values", lambda group, option: {"name": option})


@pytest.mark.second
@pytest.mark.usefixtures("repeat")
def test_a_new_drafter_is_a_module_an_entry_and_a_conf(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    pl.DataFrame({"id": ["a", "b", "c"], "prompt": ["one two", "three", "four five six"]}).write_parquet(tmp_path / "in.parquet")
    found = []
    for name in ("none", "repeat"):
        config = config_of(name)
        config.model = ModelConfig(path=str(model), dtype="float64")
        config.device, config.decode.max_new_tokens, config.decode.ignore_eos = "cpu", 12, True
        config.input.path, config.output.dir, config.output.token_ids = str(tmp_path / "in.parquet"), str(tmp_path / name), True
        check(config)
        assert f"drafter {name} (K={3 if name == 'repeat' else 0})" in plan(config).text()
        run_job(config)
        found.append(pl.read_parquet(tmp_path / name / "data").sort("id"))
    assert found[0]["token_ids"].to_list() == found[1]["token_ids"].to_list()
    with pytest.raises(ConfigError, match=r"draft.window=9 is not used by draft=repeat, only by draft=eagle3"):
        check(config_of("repeat", window=9))


def test_a_spec_without_weights_loads_none() -> None:
    spec: DrafterSpec[None] = RepeatSpec(config_of("none"), tiny_target().spec)
    assert spec.load(dtype=torch.float32, device=DEVICE) is None
