"""task=reward: scores of a checkpoint's labels after each row's last token, against transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import batchspec
from batchspec import run
from batchspec.cli import main as cli
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.features.states import StateValues
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.report.scores import ScoreTally
from batchspec.job.report.stats import job_stats
from batchspec.model.spec import load_spec
from tests.helpers.lost_runs import lose_and_continue
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_classifier, make_tokenizer, make_wrapped

LABELS = {0: "helpful", 1: "correct", 2: "long"}
HYBRID = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
"""Recurrent layers on both sides of one that attends."""


def by_transformers(model: Path, ids: list[int]) -> list[float]:
    """The scores of a row by itself, without padding."""
    loaded: Any = AutoModelForSequenceClassification
    network = loaded.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return network(torch.tensor([ids])).logits[0].tolist()  # type: ignore[no-any-return]


def test_padding_tokens_at_the_end_of_a_row_are_not_a_part_of_it(tmp_path: Path) -> None:
    """As in transformers, which looks for the last other token; of a row of nothing else it reads the first."""
    model = make_tokenizer(make_classifier(tmp_path / "model", "llama", LABELS, pad_token_id=5))
    rows = [[7, 5, 8], [7, 8, 5], [7, 8, 5, 5], [7, 8], [5, 5], [5]]
    pl.DataFrame({"prompt_ids": rows}).write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path)) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    for row, ids in zip(found.to_dicts(), rows, strict=True):
        np.testing.assert_allclose([one["score"] for one in row["scores"]], by_transformers(model, ids), atol=1e-5)
    assert found["prompt_ids"].to_list() == [[7, 5, 8], [7, 8], [7, 8], [7, 8], [5], [5]]


def check_rows(found: pl.DataFrame, model: Path, labels: list[str]) -> int:
    """Every row without an error against transformers; their number."""
    good = found.filter(pl.col("error").is_null()).to_dicts()
    for row in good:
        assert [one["label"] for one in row["scores"]] == labels
        np.testing.assert_allclose([one["score"] for one in row["scores"]], by_transformers(model, row["prompt_ids"]), atol=1e-4)
        assert (row["status"], row["finish_reason"], row["completion"]) == ("ok", "stop", None)
        assert row["usage"]["completion_tokens"] == 0
    assert found.filter(pl.col("error").is_not_null())["scores"].is_null().all()
    return len(good)


def texts() -> pl.DataFrame:
    """With common beginnings of several pages, rows longer than a pass, one of a token or two, and two bad rows."""
    common = "Say word1 word2 word3 again and again, and then say it all once more. " * 2
    prompts = [common + tail for tail in ("", "yes", "no", "no, never")] + ["a", "other words", None, "x" * 4000]
    return pl.DataFrame({"id": [f"q{i}" for i in range(len(prompts))], "prompt": prompts})


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    own = [f"model.path={model}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out", "output.prompt_ids=true"]
    return [*own, "packing.max_num_seqs=3", "packing.max_num_batched_tokens=64", *more]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_classifier(tmp_path_factory.mktemp("model"), "llama", LABELS), chat_template=CHAT_TEMPLATE)


@pytest.mark.second
@pytest.mark.parametrize(("family", "labels", "config"), [
    ("llama", LABELS, {}), ("qwen3", {0: "reward"}, {"tie_word_embeddings": True}), ("mistral", {0: "reward"}, {}),
    ("gemma3_text", {0: "a", 1: "b"}, {"sliding_window": 16}), ("qwen3_5_text", LABELS, HYBRID),
])
def test_a_job_writes_the_scores_that_transformers_computes(
    family: str, labels: dict[int, str], config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By task=auto, which one line says. Rows share prefixes, and prompts are cut over several passes."""
    model = make_tokenizer(make_classifier(tmp_path / "model", family, labels, **config))
    texts().write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path)) == 0
    said = capsys.readouterr().err
    names = ", ".join(map(repr, labels.values()))
    assert re.search(rf"task=reward, taken by task=auto: the checkpoint has a score matrix of {len(labels)} label.*{names}", said)
    assert not re.search(r"\brounds?\b", said)
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert found.schema["scores"] == pl.List(pl.Struct({"label": pl.String, "score": pl.Float32}))
    assert check_rows(found, model, [*labels.values()]) == 6
    assert [error["code"] if error else None for error in found["error"]] == [None] * 6 + ["null_prompt", "too_long"]
    assert sum(usage["cached_tokens"] for usage in found["usage"].head(6)) > 0


@pytest.mark.second
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_the_language_model_of_a_model_that_reads_images_scores_too(kind: str, tmp_path: Path) -> None:
    text = {} if kind == "gemma3" else {**HYBRID, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    names = {label: number for number, label in LABELS.items()}
    model = make_tokenizer(make_wrapped(tmp_path / "model", kind, text, scores=True, id2label=LABELS, label2id=names))
    found = batchspec.generate({"prompt_ids": [[5, 6, 7], [9] * 20]}, overrides=[f"model.path={model}", "output.prompt_ids=true"])
    assert check_rows(found, model, [*LABELS.values()]) == 2


CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]


@pytest.mark.second
def test_a_chat_is_read_to_the_end_of_the_assistants_turn_unless_the_job_or_the_row_says_otherwise(
    model: Path, tmp_path: Path
) -> None:
    rows = {"messages": [CHAT, CHAT[:1], CHAT, CHAT], "final_assistant": [None, None, "drop", "continue"]}
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path)) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    template: Any = AutoTokenizer.from_pretrained(model).apply_chat_template
    whole, asked = template(CHAT, tokenize=True)["input_ids"], template(CHAT[:1], tokenize=True)["input_ids"]
    assert found["prompt_ids"][0].to_list() == whole
    assert found["prompt_ids"][1].to_list() == asked
    assert found["prompt_ids"][2].to_list() == template(CHAT[:1], tokenize=True, add_generation_prompt=True)["input_ids"]
    assert found["prompt_ids"][3].to_list() == template(CHAT, tokenize=True, continue_final_message=True)["input_ids"]
    assert check_rows(found, model, [*LABELS.values()]) == 4
    assert [len(chat) for chat in found["messages"]] == [2, 1, 1, 2]


@pytest.mark.second
def test_answers_of_an_earlier_job_are_scored(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A judge of its own weights beside the job that wrote the answers; task=reward says that chats are whole."""
    writer = make_tokenizer(make_checkpoint(tmp_path / "writer", "llama"), chat_template=CHAT_TEMPLATE)
    pl.DataFrame({"id": ["a", "b"], "messages": [CHAT[:1]] * 2}).write_parquet(tmp_path / "in.parquet")
    first = [f"model.path={writer}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/answers", "draft=none"]
    assert run.main([*first, "decode.max_new_tokens=6", "decode.temperature=1", "decode.n=2"]) == 0
    answers = pl.read_parquet(tmp_path / "answers/data/*.parquet")
    judge = [f"model.path={model}", f"input.from_job={tmp_path}/answers", f"output.dir={tmp_path}/judged"]
    assert run.main(judge) == 2
    assert "task=reward scores it" in capsys.readouterr().err
    assert run.main([*judge, "task=reward", "output.prompt_ids=true", "input.from_status=[ok,truncated]"]) == 0
    judged = pl.read_parquet(tmp_path / "judged/data/*.parquet")
    assert check_rows(judged, model, [*LABELS.values()]) == 4
    assert judged["answers_completion"].to_list() == answers["completion"].to_list()
    ends = AutoTokenizer.from_pretrained(model).batch_decode(judged["prompt_ids"].to_list())
    for text, answer in zip(ends, answers["completion"], strict=True):
        assert text.endswith(f"{answer}<|im_end|>\n")


@pytest.mark.second
def test_the_best_and_the_worst_answer_by_a_reward_are_exported_as_a_pair(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--join takes the folder of the job that scored them, and finds the rows by the names that input.from_job gave them."""
    writer = make_tokenizer(make_checkpoint(tmp_path / "writer", "llama"), chat_template=CHAT_TEMPLATE)
    pl.DataFrame({"id": ["a", "b"], "messages": [CHAT[:1]] * 2}).write_parquet(tmp_path / "in.parquet")
    first = [f"model.path={writer}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/answers", "draft=none"]
    assert run.main([*first, "decode.max_new_tokens=6", "decode.temperature=1", "decode.n=3"]) == 0
    judge = [f"model.path={model}", f"input.from_job={tmp_path}/answers", f"output.dir={tmp_path}/judged", "task=reward"]
    words = ["export", f"{tmp_path}/answers", "--to", "preference", "--join", f"{tmp_path}/judged", "--status", "ok,truncated"]
    words += ["--score", "scores[1]->'score'", f"{tmp_path}/pairs.parquet"]
    assert cli(words) == 2
    assert "not .parquet or .jsonl, and no folder of a job" in capsys.readouterr().err
    assert run.main(judge) == 0
    assert cli(words) == 0
    pairs = pl.read_parquet(tmp_path / "pairs.parquet")
    scored = pl.read_parquet(tmp_path / "judged/data/*.parquet").with_columns(
        score=pl.col("scores").list.get(0).struct.field("score").cast(pl.Float64)
    )
    assert pairs["request_id"].to_list() == ["a", "b"]
    for pair in pairs.to_dicts():
        own = scored.filter(answers_request_id=pair["request_id"]).sort("score").to_dicts()
        assert pair["prompt"] == CHAT[:1]
        for side, row in (("chosen", own[-1]), ("rejected", own[0])):
            assert pair[f"score_{side}"] == row["score"]
            assert pair[side] == [{"role": "assistant", "content": row["answers_completion"]}]
    words[-1] = f"{tmp_path}/other.parquet"
    (tmp_path / "answers").rename(tmp_path / "moved")
    words[1] = f"{tmp_path}/moved"
    assert cli(words) == 0, "the folder may have another place by now"
    words[words.index("--join") + 1], words[-1] = f"{tmp_path}/moved", f"{tmp_path}/third.parquet"
    assert cli(words) == 2
    assert "not a job that scores answers of another one; run one with input.from_job and task=reward" in capsys.readouterr().err


@pytest.mark.second
def test_scores_of_other_answers_are_not_joined(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are those of the input: another job has them too, and so has this one before a retry."""
    writer = make_tokenizer(make_checkpoint(tmp_path / "writer", "llama"), chat_template=CHAT_TEMPLATE)
    rows = pl.DataFrame({"id": ["a", "b"], "messages": [CHAT[:1]] * 2})
    rows.write_parquet(tmp_path / "in.parquet")
    rows.with_columns(scores=0.5).write_parquet(tmp_path / "scored.parquet")
    common = [f"model.path={writer}", "draft=none", "decode.temperature=1", "decode.n=2"]
    first = [*common, f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/x/answers", "decode.max_new_tokens=6"]
    other = [word.replace("/x/", "/y/") for word in first]
    assert run.main(first) == run.main([*other, "decode.seed=7"]) == 0
    judge = [f"model.path={model}", f"input.from_job={tmp_path}/x/answers", f"output.dir={tmp_path}/judged", "task=reward"]
    assert run.main(judge) == 0

    def exported(folder: str, judged: str = "judged") -> int:
        words = ["export", f"{tmp_path}/{folder}/answers", "--to", "chat", "--join", f"{tmp_path}/{judged}", "--overwrite"]
        return cli([*words, "--status", "ok,truncated", "--score", "scores[1]->'score'", f"{tmp_path}/best.parquet"])

    assert exported("x") == 0
    capsys.readouterr()
    said = "its scores are of another job's answers or of older ones, as it read another "
    assert exported("y") == 2
    assert said in capsys.readouterr().err
    assert run.main([*first, "resume=length", "decode.max_new_tokens=12"]) == 0
    assert exported("x") == 2
    assert said in capsys.readouterr().err
    same = [word.replace("/x/", "/z/").replace("in.parquet", "scored.parquet") for word in first]
    assert run.main(same) == 0
    assert run.main([word.replace("/x/", "/z/").replace("judged", "judged_z") for word in judge]) == 0
    assert exported("z", "judged_z") == 2
    assert "the output has a column 'scores' too; join a file with it under another name" in capsys.readouterr().err


@pytest.mark.second
def test_a_lost_run_is_continued_and_the_commands_know_the_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal keeps scores, so that the next run computes nothing; neither does one of a finished job."""
    texts().write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path, "output.shard_rows=8")

    lose_and_continue(words, (StateValues, "read"), capsys, rows=6)
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert check_rows(found, model, [*LABELS.values()]) == 6
    assert json.loads(OutputFolder(tmp_path / "out").manifest.fingerprint["task"]) == "reward"
    stats = job_stats(tmp_path / "out").scores
    assert [one.label for one in stats] == [*LABELS.values()]
    own = found["scores"].drop_nulls().list.get(1).struct.field("score").cast(pl.Float64)
    assert (stats[1].rows, stats[1].mean, stats[1].deviation) == pytest.approx((6, own.mean(), own.std(ddof=0)))
    assert (stats[1].least, stats[1].greatest) == (own.min(), own.max())
    for command in (["stats", str(tmp_path / "out")], ["status", str(tmp_path / "out")], ["inspect", str(tmp_path / "out"), "q1"],
                    ["report", str(tmp_path / "out")]):
        assert cli(command) == 0, command
    assert cli(["export", str(tmp_path / "out"), "--to", "chat", str(tmp_path / "x.jsonl")]) == 2
    assert cli(["verify", str(tmp_path / "out")]) == 2
    shown, said = capsys.readouterr()
    assert re.search(r"^scores\n.*label +rows +mean +deviation +least +greatest\n *helpful +6 ", shown, re.MULTILINE)
    assert "<th>deviation</th>" in (tmp_path / "out/report.html").read_text()
    assert "holds scores of prompts and no answer" in said
    assert "holds scores and no output tokens" in said


def test_plan_says_what_is_done(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts().write_parquet(tmp_path / "in.parquet")
    assert cli(["plan", *words_of(model, tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "task         task=reward, taken by task=auto: the checkpoint has a score matrix of 3 labels" in said
    assert "rounds       none: labels are scored after each row's last token, nothing is decoded" in said


@pytest.mark.parametrize(("words", "said"), [
    (["decode.max_new_tokens=3"],
     "task=auto is reward, because the checkpoint has a score matrix of 3 labels in place of an output matrix: "
     "decode.max_new_tokens=3 with task=reward has no effect: no token is decoded; remove it"),
    (["task=reward", "draft=lookup"], "draft=lookup with task=reward drafts nothing; remove the keys of draft"),
    (["task=reward", "decode.deterministic=true"], "decode.deterministic=true with task=reward is not supported; remove one"),
    (["task=reward", "decode.score=prompts"],
     "task=reward beside decode.score=prompts: each says what is done to a row; remove one"),
    (["task=generate"], "task=generate needs an output matrix, and model.path="),
    (["decode.score=prompts"], "decode.score=prompts needs an output matrix, and model.path="),
    (["task=generate", "input.final_assistant=complete"], "input.final_assistant=complete is for jobs that decode no answer; "),
    (["task=rewards"], "task=rewards must be one of auto, generate, reward"),
])
def test_what_the_task_excludes_is_refused_before_any_work(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", *words])


def test_states_of_a_model_with_labels_can_be_embedded(model: Path) -> None:
    """Its score matrix is neither needed nor read."""
    found = batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "task=embed"])
    assert found["error"].to_list() == [None]


def test_a_column_of_the_input_that_is_called_scores_is_none_of_the_jobs_own(tmp_path: Path) -> None:
    """Statistics of a job that decodes leave it alone."""
    own = make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    pl.DataFrame({"prompt": ["a", "b"], "scores": [0.5, 1.5]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={own}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out"]
    assert run.main([*words, "decode.max_new_tokens=2"]) == 0
    assert job_stats(tmp_path / "out").scores == ()


@pytest.mark.parametrize("key", ["AutoModel", "AutoModelForSequenceClassification"])
def test_code_of_the_folder_is_never_run_and_its_model_is_refused(model: Path, tmp_path: Path, key: str) -> None:
    values = json.loads((model / "config.json").read_text())
    for name, known in (("modeling_x.BidirectionalLlama", False), ("modeling_x.LlamaModel", True)):
        (tmp_path / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoConfig": "x.Config", key: name}}))
        if known:
            assert load_spec(tmp_path).labels
        else:
            with pytest.raises(CheckpointError, match=rf"{key}.*code of its own, which batchspec never runs"):
                load_spec(tmp_path)


def test_attention_to_later_tokens_is_refused_in_every_family(model: Path, tmp_path: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"use_bidirectional_attention": True}))
    with pytest.raises(CheckpointError, match="use_bidirectional_attention=true"):
        load_spec(tmp_path)


def test_a_checkpoint_with_an_output_matrix_has_no_labels(tmp_path: Path) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    said = rf"task=reward needs a score matrix \(...ForSequenceClassification\), and model.path={model} has an output matrix"
    with pytest.raises(ConfigError, match=said):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "task=reward"])


@pytest.mark.parametrize(("changes", "labels"), [
    ({}, ("helpful", "correct", "long")),
    ({"id2label": None, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ({"id2label": None}, ("LABEL_0", "LABEL_1")),
    ({"id2label": {"0": "a", "2": "b"}}, "must name the labels 0, 1, ... without a gap"),
    ({"id2label": {"0": "a", "1": "a"}}, "gives two labels one name"),
    ({"id2label": {"0": 7}}, "id2label.0 is 7; it must be a string"),
])
def test_labels_are_those_of_id2label(model: Path, tmp_path: Path, changes: dict[str, Any], labels: Any) -> None:
    """Without it they have the names and the number that transformers gives them."""
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if isinstance(labels, str):
        with pytest.raises(CheckpointError, match=re.escape(labels)):
            load_spec(tmp_path)
    else:
        assert load_spec(tmp_path).labels == labels


def test_a_score_matrix_of_another_shape_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((model / "config.json").read_text()), "id2label": {"0": "one"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={tmp_path}"])


@pytest.mark.second
def test_a_warm_engine_scores_call_after_call_and_with_new_weights(model: Path, tmp_path: Path) -> None:
    other = make_classifier(tmp_path / "other", "llama", LABELS, seed=5)
    data = {"id": ["a", "b"], "prompt": ["Say word1 word2.", "Another prompt."]}
    keys = {"model.path": str(model), "output.prompt_ids": True}
    with batchspec.Engine(keys) as engine:
        first, second = engine.generate(data), engine.generate(data)
        assert first["scores"].to_list() == second["scores"].to_list()
        assert check_rows(first, model, [*LABELS.values()]) == 2
        with pytest.raises(ConfigError, match="task=reward writes no answers, which a conversation needs"):
            engine.converse(data, lambda turn: None)
        engine.load_weights(other)
        assert check_rows(engine.generate(data), other, [*LABELS.values()]) == 2


@pytest.mark.second
def test_a_row_whose_scores_are_not_finite_is_an_error_row_and_the_others_stay(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    frame = batchspec.generate({"prompt_ids": [[5, 6, 7], [5, 65], [9]]}, overrides=[f"model.path={tmp_path}"])
    assert frame["status"].to_list() == ["ok", "error", "ok"]
    assert frame["error"][1]["code"] == "non_finite_logits"
    assert frame["scores"].is_null().to_list() == [False, True, False]


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=6))
def test_statistics_of_scores_do_not_depend_on_how_much_is_read_at_once(parts: list[list[float]]) -> None:
    kind = pl.List(pl.Struct({"label": pl.String, "score": pl.Float32}))
    tally, every = ScoreTally({"task": "reward"}), np.array([score for part in parts for score in part], np.float64)
    for part in parts:
        cells = [None, *([{"label": "a", "score": score}, {"label": "b", "score": -score}] for score in part)]
        tally.add(pl.DataFrame({"scores": pl.Series(cells, dtype=kind)}))
    found = tally.result()
    assert len(found) == (2 if len(every) else 0)
    for one, values in zip(found, (every, -every), strict=False):
        expected = len(values), values.mean(), values.std(), values.min(), values.max()
        assert (one.rows, one.mean, one.deviation, one.least, one.greatest) == pytest.approx(expected, rel=1e-6, abs=1e-3)


@pytest.mark.second
def test_ranks_that_compute_the_model_together_write_the_same_scores(model: Path, tmp_path: Path) -> None:
    texts().write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path, "device=cpu", "cluster.tensor_parallel=2")
    subprocess.run([sys.executable, "-m", "batchspec.run", *words], check=True, timeout=300)
    assert check_rows(pl.read_parquet(tmp_path / "out/data/*.parquet"), model, [*LABELS.values()]) == 6
