"""draft=auto: the checkpoint's MTP layer drafts if there is one, else lookup; jobs go on when another drafter is chosen."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import run
from batchspec.commands.planning import plan, plan_for
from batchspec.config.checks import check
from batchspec.config.compose import compose, composed
from batchspec.config.draft_auto import with_drafter
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.drafters import DRAFTERS
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.config.train_schema import TrainRun, check_training
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import open_model
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.model.spec import load_spec
from batchspec.warm.engine import Engine
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_prompts, run_apart, signalled_after_commits

ROWS = 18
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
HAS, HAS_NOT = "the checkpoint has an MTP layer", "the checkpoint has no MTP layer"


# --- which drafter, and with which keys


def test_auto_is_the_default_of_a_job_on_the_command_line_and_in_python() -> None:
    assert compose([]).draft == RunConfig().draft == DraftConfig()
    assert (DraftConfig().name, DraftConfig().num_speculative_tokens) == ("auto", None)


@pytest.mark.parametrize(("has_mtp", "name", "why"), [(True, "mtp", HAS), (False, "lookup", HAS_NOT)])
def test_the_chosen_drafter_has_the_keys_of_its_own_conf(has_mtp: bool, name: str, why: str) -> None:
    found, said = with_drafter(compose([]), has_mtp=has_mtp)
    assert found == compose([f"draft={name}"])
    assert said == why


def test_every_drafter_that_auto_may_become_is_one() -> None:
    assert set(DRAFTERS["auto"].chooses) == {"mtp", "lookup"} < set(DRAFTERS)


@pytest.mark.parametrize("has_mtp", [True, False])
def test_a_drafter_that_the_job_names_stays_with_its_keys(has_mtp: bool) -> None:
    named = compose(["draft=lookup", "draft.num_speculative_tokens=4", "draft.prompt_lookup_max=3"])
    assert with_drafter(named, has_mtp=has_mtp) == (named, "")


@pytest.mark.parametrize(("name", "usual"), [("eagle3", 3), ("pard", 5), ("lookup", 8), ("none", None)])
def test_a_drafter_that_is_named_by_its_key_alone_has_its_usual_length(name: str, usual: int | None) -> None:
    more = ["draft.path=head"] if name in ("eagle3", "pard") else []
    found, why = with_drafter(compose([f"draft.name={name}", *more]), has_mtp=True)
    assert (found.draft.name, found.draft.num_speculative_tokens, why) == (name, usual, "")


KEPT = [
    (True, "num_speculative_tokens", 5), (False, "num_speculative_tokens", 5), (True, "adaptive", False),
    (False, "adaptive", True), (False, "prompt_lookup_min", 3), (False, "corpus_tokens", 1000), (True, "coupled", False),
    (True, "window", 64),
]


@pytest.mark.parametrize(("has_mtp", "key", "value"), KEPT)
def test_a_key_that_the_chosen_drafter_reads_keeps_the_value_that_the_job_gives(has_mtp: bool, key: str, value: Any) -> None:
    found, _ = with_drafter(compose([f"draft.{key}={str(value).lower()}"]), has_mtp=has_mtp)
    assert getattr(found.draft, key) == value
    assert found.draft.name == ("mtp" if has_mtp else "lookup")


@pytest.mark.parametrize(
    ("has_mtp", "key", "said"),
    [
        (True, "draft.prompt_lookup_min=3", f"draft=auto took mtp, because {HAS}: draft.prompt_lookup_min=3 is not used by draft="
         "mtp, only by draft=lookup or draft=hybrid; remove the key"),
        (True, "draft.corpus_tokens=1000", "draft.corpus_tokens=1000 is not used by draft=mtp"),
        (False, "draft.window=64", f"draft=auto took lookup, because {HAS_NOT}: draft.window=64 is not used by draft=lookup, "),
        (False, "draft.coupled=false", "draft.coupled=false is not used by draft=lookup"),
        (True, "draft.synthetic=[.5,.5,.4,.3]", "has 4 rates; draft.num_speculative_tokens=3 needs as many"),
        (False, "draft.synthetic=[.5,.5,.4]", "has 3 rates; draft.num_speculative_tokens=8 needs as many"),
    ],
)
def test_a_key_that_the_chosen_drafter_does_not_read_is_refused_with_the_reason_of_the_choice(
    has_mtp: bool, key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        with_drafter(compose([key]), has_mtp=has_mtp)
    assert said in str(refused.value)
    assert str(refused.value).startswith("draft=auto took ")
    assert "\n" not in str(refused.value)


def test_what_no_drafter_of_auto_reads_is_refused_before_there_is_a_model() -> None:
    with pytest.raises(ConfigError, match=r"draft.parallel=true is not used by draft=auto, only by draft=eagle3 or "):
        compose(["draft.parallel=true"])
    with pytest.raises(ConfigError, match=r"draft.tree.topk=4 is not used by draft=auto, only by draft=eagle3"):
        compose(["draft.tree.topk=4"])
    with pytest.raises(ConfigError, match=r"draft.path=head with draft=auto: name the drafter .*, one of draft=eagle3, "):
        compose(["draft.path=head"])


def test_a_draft_length_that_is_not_known_yet_is_checked_once_it_is() -> None:
    rates = ["draft.synthetic=[.9,.5,.2]"]
    assert with_drafter(compose(rates), has_mtp=True)[0].draft.synthetic == [0.9, 0.5, 0.2]
    with pytest.raises(ConfigError, match=r"draft\.num_speculative_tokens=2 needs as many"):
        compose([*rates, "draft.num_speculative_tokens=2"])
    with pytest.raises(ConfigError, match="non-increasing"):
        compose(["draft.synthetic=[.2,.9]"])


def test_a_job_that_scores_has_no_drafter() -> None:
    scored = compose(["decode.score=prompts"])
    assert with_drafter(scored, has_mtp=True) == (scored, "")
    assert scored.draft.name == "none"


def test_draft_none_has_no_length() -> None:
    check(RunConfig(draft=DraftConfig(name="none")))
    given = RunConfig(draft=DraftConfig(name="none", num_speculative_tokens=8))
    with pytest.raises(ConfigError, match=r"draft\.num_speculative_tokens=8 is not used by draft=none; remove the key"):
        check(given)
    assert with_drafter(given, has_mtp=False) == (given, ""), "of a job that began when the length had a default; verify opens it"


def test_train_needs_a_drafter_by_name_and_a_length() -> None:
    given = ["model.path=m", "input.path=i", "output.dir=o"]
    with pytest.raises(ConfigError, match=r"draft\.num_speculative_tokens is required; .* the K of the acceptance curves"):
        check_training(composed("train", [*given, "draft.num_speculative_tokens=null"], schema=TrainRun))
    with pytest.raises(ConfigError, match="draft=auto cannot be trained; use draft=eagle3"):
        check_training(composed("train", [*given, "draft=auto"], schema=TrainRun))


# --- checkpoints with and without the layer


def add_mtp(folder: Path) -> Path:
    """The checkpoint with random tensors of an MTP layer, which transformers does not save."""
    spec, noise = load_spec(folder), torch.Generator().manual_seed(1)
    assert spec.mtp is not None
    own = {
        tensor.name: torch.randn(tensor.shape, generator=noise, dtype=torch.float64) * tensor.shape[-1] ** -0.5
        for tensor in spec.mtp.tensors()
    }
    save_file({**load_file(folder / "model.safetensors"), **own}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with an MTP layer and without, and prompts."""
    folder = tmp_path_factory.mktemp("auto")
    make_tokenizer(make_checkpoint(folder / "without", "qwen3_5_text", dtype=torch.float64, **SHAPE))
    add_mtp(shutil.copytree(folder / "without", folder / "with"))
    make_prompts(folder / "prompts.parquet", ROWS)
    return folder


def words(folder: Path, out: Path, *more: str, model: str = "with") -> list[str]:
    return [
        f"model.path={folder / model}", "model.dtype=float64", f"input.path={folder / 'prompts.parquet'}", f"output.dir={out}",
        "output.token_ids=true", "output.shard_rows=3", "decode.max_new_tokens=24", "decode.temperature=1",
        "decode.ignore_eos=true", "packing.max_num_seqs=4", "packing.memory_gb=0.05", *more,
    ]


CHOICES = [("with", "mtp", 3, HAS), ("without", "lookup", 8, HAS_NOT)]


@pytest.mark.parametrize(("model", "name", "length", "why"), CHOICES)
def test_the_tensors_of_the_checkpoint_decide(folder: Path, model: str, name: str, length: int, why: str) -> None:
    opened = open_model(compose([f"model.path={folder / model}", "device=cpu"]))
    assert (opened.config.draft.name, opened.config.draft.num_speculative_tokens, opened.why_drafter) == (name, length, why)
    assert opened.drafter.shape.draft_len == length
    named = open_model(compose([f"model.path={folder / model}", "device=cpu", "draft=lookup"]))
    assert (named.config.draft.name, named.why_drafter) == ("lookup", "")


def test_a_layer_that_is_not_complete_is_refused_with_the_way_to_do_without_it(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "with", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        open_model(compose([f"model.path={model}", "device=cpu"]))
    said = str(refused.value)
    assert said.startswith(f"draft=auto took mtp, because {HAS}: ")
    assert "1 missing tensors: mtp.fc.weight" in said
    assert said.endswith("; correct it, or choose draft=lookup")
    assert open_model(compose([f"model.path={model}", "device=cpu", "draft=lookup"])).config.draft.name == "lookup"


def test_random_weights_have_the_layers_of_the_config(folder: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(folder / "without"), load_format="dummy"), device="cpu")
    assert open_model(config).config.draft.name == "mtp"
    assert config.draft.name == "auto", "the configuration of the caller stays"


@pytest.mark.second
@pytest.mark.parametrize(("model", "name", "length", "why"), CHOICES)
def test_plan_run_and_card_say_which_drafter_was_chosen_and_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, name: str, length: int, why: str
) -> None:
    command = words(folder, tmp_path / "out", "input.limit=3", model=model)
    planned = plan(compose(command)).text()
    assert f"\ndrafter      {name}, taken by draft=auto: {why}\n" in planned
    assert f", drafter {name} (K={length}), " in planned
    assert run.main(command) == 0
    said = capsys.readouterr().err
    assert f"\ndraft={name} (draft=auto: {why}): a round drafts up to {length} tokens for each row" in said
    assert f"| Drafter | {name} (`draft=auto: {why}`) |" in (tmp_path / "out/README.md").read_text()
    manifest = OutputFolder(tmp_path / "out").manifest
    assert (manifest.config["draft"]["name"], manifest.config["draft"]["num_speculative_tokens"]) == (name, length)


@pytest.mark.second
def test_a_drafter_that_the_job_names_needs_no_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(folder, tmp_path / "out", "input.limit=3", "draft=lookup")
    assert "draft=auto" not in plan(compose(command)).text()
    assert run.main(command) == 0
    assert "draft=auto" not in capsys.readouterr().err
    assert "| Drafter | lookup |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.second
def test_a_warm_engine_shows_the_drafter_that_was_chosen(folder: Path) -> None:
    keys: dict[str, Any] = {"model.dtype": "float64", "device": "cpu", "decode.max_new_tokens": 6, "packing.memory_gb": 0.05}
    tokens = []
    for model, name in (("with", "mtp"), ("without", "lookup")):
        with Engine({"model.path": str(folder / model), **keys}) as engine:
            assert f", draft={name}, " in repr(engine)
            frame = engine.generate(["Say word1 again"])
            assert [row["drafter"] for row in frame["spec_decode"]] == [name]
            tokens.append(frame["completion"].to_list())
    assert tokens[0] == tokens[1]


# --- a job that began with another drafter


@pytest.fixture(scope="module")
def plain(folder: Path) -> pl.DataFrame:
    """The rows of a job without drafts."""
    assert run.main(words(folder, folder / "plain", "draft=none", "packing.max_num_seqs=1")) == 0
    return rows_of(folder / "plain")


def rows_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data").sort("row_index").select("request_id", "token_ids", "finish_reason")


def drafters_of(out: Path) -> set[str]:
    """Of rows that a run drafted for: a row without drafts has no name."""
    return {row["drafter"] for row in pl.read_parquet(out / "data")["spec_decode"] if row is not None}


CHANGES = [(["draft=lookup"], []), ([], ["draft=lookup"]), (["draft=none"], [])]
"""What a job begins with, and what it goes on with."""


@pytest.mark.second
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=["lookup-auto", "auto-lookup", "none-auto"])
def test_an_interrupted_job_goes_on_with_another_drafter(
    folder: Path, plain: pl.DataFrame, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    out = tmp_path / "out"
    stop = partial(signalled_after_commits, 2, signal.SIGTERM)
    code, said = run_apart(words(folder, out, *before), tmp_path / "log", stop)
    assert code == 75, said
    # Mostly the signal comes in the middle of rows; it may also come between two shards.
    assert 0 < len(list((out / "data").iterdir())) < ROWS / 3
    assert run.main(words(folder, out, *after)) == 0
    assert rows_of(out).equals(plain)
    first = "mtp" if not before else before[0].removeprefix("draft=")
    assert drafters_of(out) == {first, "lookup" if after else "mtp"} - {"none"}
    assert json.loads((out / "_batchspec/manifest.json").read_text())["recorded"]["drafter"] == first


@pytest.mark.second
@pytest.mark.parametrize(("before", "after"), CHANGES[:2], ids=["lookup-auto", "auto-lookup"])
def test_a_complete_job_is_extended_and_retried_with_another_drafter(
    folder: Path, plain: pl.DataFrame, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(words(folder, out, "input.limit=6", "decode.max_new_tokens=9", *before)) == 0
    assert run.main(words(folder, out, "decode.max_new_tokens=9", "resume=extend", *after)) == 0
    assert pl.read_parquet(out / "data").height == ROWS
    assert drafters_of(out) == {"lookup", "mtp"}
    assert run.main(words(folder, out, "resume=length", *after)) == 0
    assert rows_of(out).equals(plain)


@pytest.mark.second
def test_a_complete_job_is_complete_under_the_other_default(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(words(folder, tmp_path / "out", "draft=lookup", "input.limit=3")) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert run.main(words(folder, tmp_path / "out", "input.limit=3")) == 0
    assert "already complete: 3 rows" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


@pytest.mark.second
def test_ranks_of_one_model_choose_the_same_drafter(folder: Path, plain: pl.DataFrame, tmp_path: Path) -> None:
    command = words(folder, tmp_path / "out", "cluster.tensor_parallel=2", "packing.memory_gb=0.05", "device=cpu")
    code, said = run_apart(command, tmp_path / "log")
    assert code == 0, said
    assert f"draft=mtp (draft=auto: {HAS}): " in said
    assert drafters_of(tmp_path / "out") == {"mtp"}
    assert rows_of(tmp_path / "out").equals(plain)


# --- jobs that are too short for drafts


SHORT = "the job is too short for draft={}, whose rounds take longer to prepare than they save"


def planned(tmp_path: Path, shape: str, num_rows: int, *keys: str) -> tuple[str, str]:
    """The drafter that a job of rows with 512 output tokens has on an H200, and why."""
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    pl.DataFrame({"prompt_ids": [[5] * 64] * num_rows}).write_parquet(tmp_path / "rows.parquet")
    words = [
        f"model.path={tmp_path}", "model.load_format=dummy", f"input.path={tmp_path}/rows.parquet", "decode.max_new_tokens=512",
        "decode.ignore_eos=true", f"output.dir={tmp_path}/out",
    ]
    job = plan_for("H200", compose([*words, *keys])).job
    return job.config.draft.name, job.why_drafter


@pytest.mark.second
@pytest.mark.parametrize(("shape", "name", "why"), [("qwen3-8b", "lookup", HAS_NOT), ("qwen3.5-0.8b", "mtp", HAS)])
def test_a_job_that_ends_before_its_drafts_pay_has_none(shape: str, name: str, why: str, tmp_path: Path) -> None:
    assert planned(tmp_path, shape, 8) == ("none", SHORT.format(name))
    assert planned(tmp_path, shape, 20_000) == (name, why)


def test_a_drafter_that_was_named_or_whose_keys_were_set_drafts_in_a_short_job_too(tmp_path: Path) -> None:
    assert planned(tmp_path, "qwen3-8b", 8, "draft=lookup") == ("lookup", "")
    assert planned(tmp_path, "qwen3-8b", 8, "draft.num_speculative_tokens=3") == ("lookup", HAS_NOT)
