"""input.from_job: the output of a finished job is the input of another one."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchspec
from batchspec import cli
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.files import MemoryFile
from batchspec.data.dataset.job_file import prefix_of
from batchspec.data.dataset.job_rows import JobRows, rows_of_job
from batchspec.data.dataset.reader import place_in_file
from batchspec.data.dataset.row_ids import OF_SAMPLES, check_ids
from batchspec.data.runstate.extensions import Extension
from batchspec.data.runstate.finished_job import FinishedJob
from batchspec.data.runstate.job_state import JobState
from batchspec.errors import ConfigError, InputError
from tests.helpers.runs import make_model

PAGE = Path(__file__).parents[2] / "jobs" / "pages" / "input.md"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"model.path={make_model(tmp_path_factory.mktemp('model'))}", "draft=none", "decode.max_new_tokens=4"]


@pytest.fixture(scope="module")
def answers(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four answers to each of three questions, and a bad row; of two shards."""
    folder = tmp_path_factory.mktemp("jobs")
    chats = [[{"role": "user", "content": f"Name sea {i}."}] for i in range(3)]
    rows = [
        {"id": f"q{i}", "messages": chat, "level": i, "tags": ["a", None], "stop": ["x"]} for i, chat in enumerate([*chats, None])
    ]
    pl.DataFrame(rows).write_parquet(folder / "in.parquet")
    keys = [f"input.path={folder}/in.parquet", f"output.dir={folder}/answers", "output.shard_rows=2"]
    assert cli.main(["run", *words, *keys, "decode.n=4", "decode.temperature=1", "decode.seed=3"]) == 0
    return folder / "answers"


def output(name: str) -> pl.DataFrame:
    return pl.read_parquet(f"{name}/data/*.parquet")


def run(words: list[str], *more: str) -> int:
    return cli.main(["run", *words, *more])


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *more: str) -> str:
    """The one line with which a run is refused."""
    capsys.readouterr()
    assert run(words, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.second
def test_four_answers_are_judged_the_best_is_kept_and_its_conversation_goes_on(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ["input.prompt='Is that right at level {{ level }}?'", "decode.score=choices", "decode.choice=[yes,no]"]
    words = [word for word in words if "max_new_tokens" not in word]
    assert run(words, f"input.from_job={answers}", f"output.dir={tmp_path}/judged", *judge) == 0
    assert f"input.from_job={answers}: 12 truncated; left out: 1 error; " in capsys.readouterr().err
    first, judged = output(str(answers)), output(f"{tmp_path}/judged")
    good = first.filter(pl.col("status") != "error")
    assert judged["request_id"].to_list() == [f"q{i}#{k}" for i in range(3) for k in range(4)]
    for name in ("request_id", "sample_index", "messages", "completion"):
        assert judged[f"answers_{name}"].equals(good[name]), name
    assert judged.select("level", "tags", "stop").equals(good.select("level", "tags", "stop"))
    chat = [[*turns, f"Is that right at level {level}?"] for turns, level in zip(
        good["messages"].list.eval(pl.element().struct.field("content")).to_list(), good["level"], strict=True)]
    assert [[turn["content"] for turn in turns][:-1] for turns in judged["messages"].to_list()] == chat

    limit = sorted(judged["choice_probs"].list.get(0).struct.field("prob"))[8]
    sure = [
        *words, f"input.from_job={tmp_path}/judged", "input.prompt=Why?", "decode.max_new_tokens=3", f"output.dir={tmp_path}/no",
    ]
    assert cli.main(["plan", *sure, f"input.from_where=(choice_probs[1]->'prob') > {limit}"]) == 0
    assert "/judged: 3 ok; left out: 9 by input.from_where; " in capsys.readouterr().out
    assert refused(capsys, sure, f"input.from_where=choice_probs[1]->'prob' > {limit}").endswith(
        "an example is \"usage.completion_tokens > 50 AND (choice_probs[1]->'prob') > 0.8\", with these brackets"
    )

    best = "ROW_NUMBER() OVER (PARTITION BY answers_request_id ORDER BY choice_probs[1]->'prob' DESC) = 1"
    go_on = ["input.columns.messages=answers_messages", "input.prompt='Go on.'", "decode.max_new_tokens=3"]
    assert run(words, f"input.from_job={tmp_path}/judged", f"output.dir={tmp_path}/next", f"input.from_where={best}", *go_on) == 0
    assert "/judged: 3 ok; left out: 9 by input.from_where; " in capsys.readouterr().err
    found = output(f"{tmp_path}/next")
    judged = judged.with_columns(yes=pl.col("choice_probs").list.get(0).struct.field("prob"))
    chosen = judged.filter(pl.col("yes") == pl.col("yes").max().over("level")).unique("level", keep="first", maintain_order=True)
    for name in ("request_id", "choice_probs"):
        assert found[f"judged_{name}"].equals(chosen[name], check_names=False)
    assert found["request_id"].equals(chosen["request_id"])
    for name in ("answers_completion", "answers_messages", "level"):
        assert found[name].equals(chosen[name])
    before = [[*turns, {"role": "user", "content": "Go on."}] for turns in chosen["answers_messages"].to_list()]
    assert [turns[:-1] for turns in found["messages"].to_list()] == before


def test_pairs_are_exported_by_the_probability_that_a_judge_gave_as_the_page_says(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ["input.prompt=Right?", "decode.score=choices", "decode.choice=[yes,no]", f"output.dir={tmp_path}/out/judged"]
    words = [word for word in words if "max_new_tokens" not in word]
    assert run(words, f"input.from_job={answers}", *judge) == 0
    monkeypatch.chdir(tmp_path)
    shutil.copytree(answers, "out/answers")
    assert cli.main(["export", "out/judged", "--to", "preference", "--score", "choice_probs[1]->'prob'", "no.jsonl"]) == 2
    problem = capsys.readouterr().err.splitlines()[-1]
    assert "no.jsonl is not written: all rows of out/judged are left out (12 of requests without a better" in problem
    section = PAGE.read_text(encoding="utf-8").split("\n## The answers of an earlier job\n")[1].split("\n## ")[0]
    _, bash = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    assert cli.main([*shlex.split(bash)[1:], "--status", "truncated"]) == 0
    judged, pairs = output("out/judged"), pl.read_ndjson("pairs.jsonl").sort("request_id")
    assert pairs["request_id"].to_list() == ["q0", "q1", "q2"]
    yes = judged.select("answers_request_id", yes=pl.col("choice_probs").list.get(0).struct.field("prob"))
    assert pairs["score_chosen"].to_list() == yes.group_by("answers_request_id").max().sort("answers_request_id")["yes"].to_list()


def test_the_same_in_python_and_in_plan(words: list[str], answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*words, f"input.from_job={answers}", "input.final_assistant=continue", "input.limit=5"]
    found = batchspec.generate(overrides=keys)
    assert found["request_id"].to_list() == ["q0#0", "q0#1", "q0#2", "q0#3", "q1#0"]
    longer = found["messages"].list.last().struct.field("content")
    assert longer.equals(found["answers_completion"] + found["completion"])
    assert cli.main(["plan", *keys]) == 0
    assert f"input.from_job={answers}: 12 truncated; left out: 1 error" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"beside rows: the rows of that job are the input; remove one"):
        batchspec.generate(["text"], overrides=keys)


@pytest.mark.second
def test_answers_in_memory_are_the_input_of_the_next_call_and_of_an_engine(words: list[str], answers: Path) -> None:
    first, bare = output(str(answers)), [word for word in words if "new_tokens" not in word]
    keys = [*bare, "input.prompt='Is {{ level }} right?'", "decode.score=choices", "decode.choice=[yes,no]"]
    judged = batchspec.generate(batchspec.JobOutput(first, "answers"), overrides=keys)
    of_folder = batchspec.generate(batchspec.JobOutput(answers), overrides=keys)
    assert judged.drop("perf", "usage").equals(of_folder.drop("perf", "usage"))
    assert judged["request_id"].to_list() == [f"q{i}#{k}" for i in range(3) for k in range(4)]
    best = judged.sort("answers_sample_index", descending=True).unique("level", keep="first").drop("perf", "usage")
    rows = batchspec.JobOutput(best.with_columns(score=1.5), "judged")
    go_on = [*words, "model.max_len=200", "packing.max_num_seqs=4", "input.prompt=Go", "input.columns.messages=answers_messages"]
    seen = []
    with batchspec.Engine(go_on) as engine:
        found = engine.generate(rows).sort("level")
        engine.converse(rows, lambda turn: seen.append([message["content"] for message in turn.messages][2]))
        assert len(list(engine.stream(batchspec.JobOutput(best, "judged", where="level > 0")))) == 2
    assert found["request_id"].to_list() == [f"q{i}#3" for i in range(3)]
    assert found["messages"].list.len().to_list() == [4, 4, 4]
    assert found["score"].to_list() == [1.5] * 3
    assert found["judged_request_id"].equals(found["request_id"], check_names=False)
    assert seen == ["Go"] * 3
    for wrong, said in [
        (batchspec.JobOutput(first), "of rows in memory needs a name"),
        (batchspec.JobOutput(answers, "other"), "the folder's own name is taken; remove the name"),
        (batchspec.JobOutput(first.drop("status"), "answers"), "the rows have no column 'status'"),
        (batchspec.JobOutput(first.drop("messages"), "answers"), "its output has no messages"),
        (batchspec.JobOutput(answers, status="ok"), "input.from_status=ok must be some of"),
    ]:
        with pytest.raises((ConfigError, InputError), match=said):
            batchspec.generate(wrong, overrides=keys)
    with pytest.raises(ConfigError, match=r"beside batchspec\.JobOutput, which says the same"):
        batchspec.generate(batchspec.JobOutput(first, "answers"), overrides=[*keys, f"input.from_job={answers}"])


def test_a_template_adds_a_user_turn_to_the_chats_that_are_named(words: list[str]) -> None:
    ask, answer = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "One."}
    function = '[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    call = {"role": "assistant", "content": "", "tool_calls": function}
    rows = [{"q": i, "messages": chat} for i, chat in enumerate([[ask, answer], [ask], [ask, call], [], None])]
    keys = [*words, "input.columns.messages=messages", "input.prompt='And {{ q }}?'", "input.system=Be brief"]
    found = batchspec.generate(rows, overrides=[*keys, "input.max_error_fraction=1"])
    turns = found["messages"][0].to_list()
    assert [turn["content"] for turn in turns[:-1]] == ["Be brief", "One?", "One.", "And 0?"]
    assert turns[-1]["content"] == found["completion"][0]
    errors = found["error"].struct.field("message").to_list()
    codes = found["error"].struct.field("code").to_list()
    assert codes == [None, "bad_messages", "bad_messages", "empty_prompt", "null_prompt"]
    assert "the chat ends with a turn of role user, and input.prompt adds a user turn after an answer" in errors[1]
    assert "the chat ends with tool calls" in errors[2]


@pytest.mark.second
def test_what_makes_no_input_is_refused_in_one_line(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn, new, of = "input.prompt='Go on.'", f"output.dir={tmp_path}/new", f"input.from_job={answers}"
    link = tmp_path / "link"
    link.symlink_to(answers)
    cases = [
        ([of, f"output.dir={answers}", "output.overwrite=true", turn], f"output.dir={answers} lies in input.from_job={answers}"),
        ([of, f"output.dir={link}", "output.overwrite=true", turn], f"output.dir={link} lies in input.from_job={answers}"),
        ([of, f"output.dir={answers}/data/next", turn], "whose files must stay; choose another place"),
        ([of, f"input.path={answers}", new, turn], f"beside input.from_job={answers}, which is the whole input; remove one"),
        ([of, "input.split=train", new, turn], "input.split=train beside input.from_job="),
        ([of, "input.columns.id=level", new, turn], "input.columns.id=level beside input.from_job="),
        ([of, "input.from_status=[okay]", new, turn], "input.from_status=['okay'] must be some of ok, truncated, invalid"),
        ([of, "input.from_status=ok", new, turn], "answers: no row; left out: 1 error, 12 truncated; take others by"),
        ([of, "input.from_where=level > 5", new, turn], "no row; left out: 1 error, 12 by input.from_where; take others by"),
        ([of, "input.from_where=levle > 5", new, turn], "input.from_where=levle > 5: no column 'levle'; did you mean level?"),
        ([of, "input.from_where=level", new, turn], "input.from_where=level: its values are Int64, not true or false"),
        ([of, "input.from_where=level >", new, turn], "input.from_where=level >: not an SQL expression ("),
        ([of, new], "its chats end with the answers; input.prompt=TEMPLATE makes the next user turn"),
        ([of, new, turn, "input.final_assistant=continue"], "input.final_assistant=continue has no effect"),
        ([of, new, "input.prompt='{{ completion }}'"], "no such column; did you mean 'answers_completion'?"),
        ([f"input.path={answers}", "input.from_status=ok", new], "has no effect without input.from_job"),
        ([f"input.path={answers}", "input.from_where=true", new], "input.from_where=true has no effect without"),
        ([f"input.from_job={tmp_path}", new, turn], f"{tmp_path} holds no batchspec job"),
        ([f"input.from_job={tmp_path}/none", new, turn], f"{tmp_path}/none holds no batchspec job"),
    ]
    for keys, said in cases:
        assert said in refused(capsys, words, *keys), keys
    assert len(output(str(answers))) == 13
    assert not (tmp_path / "new").exists()


@pytest.mark.second
def test_a_job_that_is_not_finished_is_refused_with_the_command_that_finishes_it(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").symlink_to(words[0].removeprefix("model.path="))
    shutil.copy(answers.parent / "in.parquet", "in.parquet")
    job = ["model.path=m", "input.path=in.parquet", "output.dir=old", "output.shard_rows=2", "decode.stop=[a b,c]"]
    assert run(job, "draft=none", "decode.max_new_tokens=3") == 0
    Path("old").rename("half")
    Path("half/data/part-00001.parquet").unlink()
    new = ["input.from_job=half", "input.prompt=Go", "output.dir=new"]
    line = refused(capsys, words, *new)
    said, command = line.split("finish it: batchspec run ")
    assert said == "batchspec: input.from_job=half is not finished: 2 of 4 rows are done; "
    assert run(shlex.split(command)) == 0
    assert run(words, *new) == 0


@pytest.mark.second
def test_a_job_resumes_over_the_same_answers_and_refuses_changed_ones(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "answers"
    shutil.copytree(answers, before)
    job = [f"input.from_job={before}", "input.prompt=Go", f"output.dir={tmp_path}/new"]
    assert run(words, *job) == 0
    assert "input.from_status" in refused(capsys, words, *job, "input.from_status=[truncated]")
    retry = [*words, f"input.path={answers.parent}/in.parquet", f"output.dir={before}", "output.shard_rows=2", "decode.n=4"]
    sampled = ["decode.temperature=1", "decode.seed=3", "decode.max_new_tokens=6", "resume=length"]
    assert cli.main(["run", *retry, *sampled]) == 0
    assert "input.files: part-00000.parquet has other content" in refused(capsys, words, *job)
    assert run(words, *job, "output.overwrite=true") == 0
    assert cli.main(["verify", f"{tmp_path}/new", "--rows", "3"]) == 0


def test_a_job_that_changes_while_it_is_opened_is_refused(answers: Path, tmp_path: Path) -> None:
    job = FinishedJob(str(answers), "input.from_job")
    job.check_unchanged()
    shutil.copytree(answers, tmp_path / "answers")
    job = FinishedJob(str(tmp_path / "answers"), "input.from_job")
    state = JobState(tmp_path / "answers")
    manifest = state.manifest
    state.extend(
        Extension(
            number=1, fingerprint=manifest.fingerprint, config=manifest.config, num_rows=manifest.num_rows + 1, shard_rows=2,
            files=manifest.files, job=manifest.job,
        )
    )
    with pytest.raises(InputError, match=r"answers: a run began to change that job just now"):
        job.check_unchanged()
    with pytest.raises(InputError, match=r"answers is not finished: 4 of 5 rows are done; finish it: batchspec run model.path="):
        FinishedJob(str(tmp_path / "answers"), "input.from_job")


@pytest.mark.second
def test_rows_of_an_extended_job_are_added_by_an_extension(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.DataFrame({"prompt": ["One", "Two", "Three"]}).write_parquet(tmp_path / "in.parquet")
    first = [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/first", "output.shard_rows=1"]
    second = [f"input.from_job={tmp_path}/first", f"output.dir={tmp_path}/second", "input.columns.prompt=first_completion"]
    assert run(words, *first, "input.limit=2") == 0
    assert run(words, *second) == 0
    assert run(words, *first, "resume=extend") == 0
    assert "resume=extend adds 1 row to this job" in refused(capsys, words, *second)
    assert run(words, *second, "resume=extend") == 0
    found = output(f"{tmp_path}/second")
    assert found["request_id"].to_list() == [f"in.parquet:{i}" for i in range(3)]
    assert found["prompt"].to_list() == ["One", "Two", "Three"]


@pytest.mark.second
def test_what_an_earlier_job_did_not_write_is_missed_before_any_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.DataFrame({"prompt": ["One"], "tag": ["t"]}).write_parquet(tmp_path / "texts.parquet")
    pl.DataFrame({"prompt_ids": [[5, 6]], "tag": ["t"]}).write_parquet(tmp_path / "ids.parquet")

    def after(name: str, rows: str, *keys: str) -> list[str]:
        assert run(words, f"input.path={tmp_path}/{rows}.parquet", f"output.dir={tmp_path}/{name}", *keys) == 0
        return [f"input.from_job={tmp_path}/{name}", "input.prompt='{{ tag }}'", f"output.dir={tmp_path}/after_{name}"]

    bare = after("bare", "texts", "output.messages=none")
    assert "/bare: its output has no messages; set input.columns.messages=null" in refused(capsys, words, *bare)
    half = after("half", "texts", "output.messages=prompt")
    assert "messages lack the answers (output.messages=prompt)" in refused(capsys, words, *half)
    ids = after("ids", "ids")
    assert "its messages are null, as its prompts were prompt_ids" in refused(capsys, words, *ids)
    for keys in (bare, half, ids):
        assert run(words, *keys, "input.columns.messages=null") == 0
    assert output(f"{tmp_path}/after_ids")["messages"][0][0]["content"] == "t"


@pytest.mark.second
def test_prompts_that_were_scored_are_answered_and_error_rows_are_asked_again(words: list[str], tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "One"}], None, [{"role": "user", "content": "Two"}]]
    pl.DataFrame({"id": [7, 8, 9], "messages": chats}).write_parquet(tmp_path / "in.parquet")
    bare = [word for word in words if "new_tokens" not in word]
    scored = [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/scored", "decode.score=prompts", "model.max_len=64"]
    assert run(bare, *scored) == 0
    answered = batchspec.generate(overrides=[*words, f"input.from_job={tmp_path}/scored"])
    assert answered["request_id"].to_list() == ["7", "9"]
    assert answered["scored_prompt_logprob_sum"].null_count() == 0
    assert answered["messages"].list.len().to_list() == [2, 2]
    short = [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/short", "model.max_len=24", "input.system=Be brief"]
    assert run(words, *short) == 3
    again = batchspec.generate(overrides=[*words, f"input.from_job={tmp_path}/short", "input.from_status=[error]"])
    assert again["status"].to_list() == ["truncated", "error", "truncated"]
    assert again["messages"][0].to_list()[0] == {"role": "system", "content": "Be brief"}


Row = tuple[str, int, str]
"""Request, sample, status."""


def rows_of(rows: list[Row], *statuses: str, where: str | None = None, **copied: pa.Array) -> JobRows:
    """The rows with these statuses of the output of a job `first`, and its copied columns."""
    requests = [request for request, _, _ in rows]
    own = {
        "request_id": pa.array(requests, pa.string()),
        "row_index": pa.array([requests.index(request) for request in requests], pa.int64()),
        "sample_index": pa.array([sample for _, sample, _ in rows], pa.int32()),
        "status": pa.array([status for _, _, status in rows], pa.string()),
        "completion": pa.array([f"{request}, {sample}" for request, sample, _ in rows], pa.large_string()),
        "token_ids": pa.array([[sample] for _, sample, _ in rows], pa.list_(pa.int32())),
        "perf": pa.nulls(len(rows), pa.struct([("slot", pa.int32())])),
    }
    config = InputConfig(from_job="first", from_where=where, columns={"messages": None}, prompt="{{ first_completion }}")
    config.from_status = list(statuses) or config.from_status
    return rows_of_job([MemoryFile(pa.table(own | copied))], {}, config)


SAMPLES = st.lists(st.sampled_from(["ok", "truncated", "error", "skipped"]), min_size=1, max_size=4)


@pytest.mark.second
@given(st.lists(SAMPLES, min_size=1, max_size=6))
def test_each_taken_row_has_an_id_of_its_own_and_its_own_cells(requests: list[list[str]]) -> None:
    rows = [(f"q{i}", k, status) for i, samples in enumerate(requests) for k, status in enumerate(samples)]
    taken = [(at, row) for at, row in enumerate(rows) if row[2] in ("ok", "error")]
    if not taken:
        with pytest.raises(InputError, match=r"input.from_job=first: no row; left out: "):
            rows_of(rows, "ok", "error")
        return
    source = rows_of(rows, "ok", "error").source
    table = pa.concat_tables([shard.table for shard in source.shards(2)])
    counts = {f"q{i}": len(samples) for i, samples in enumerate(requests)}
    assert table["request_id"].to_pylist() == [f"{q}#{k}" if counts[q] > 1 else q for _, (q, k, _) in taken]
    assert table["first_request_id"].to_pylist() == [q for _, (q, _, _) in taken]
    assert table["first_completion"].to_pylist() == [f"{q}, {k}" for _, (q, k, _) in taken]
    assert [place_in_file(source, row) for row in range(len(taken))] == [f"table row {at}" for at, _ in taken]


def test_an_id_that_looks_like_a_sample_s_is_refused_beside_that_sample() -> None:
    rows = [("a", 0, "ok"), ("a", 1, "ok"), ("a#1", 0, "ok"), ("b#1", 0, "ok")]
    columns = ColumnMap(names={"id": "request_id"}, prompt_kind="prompt")
    with pytest.raises(InputError, match=r"id 'a#1' is in table row 1 and again in table row 2; .* leave the other out by"):
        check_ids(rows_of(rows).source, columns, OF_SAMPLES)
    check_ids(rows_of(rows, where="request_id <> 'a#1'").source, columns, OF_SAMPLES)


def test_columns_keep_their_types_and_only_names_of_a_job_s_own_columns_change() -> None:
    cells = {
        "words": pa.array(["a"], pa.string()).dictionary_encode(),
        "box": pa.array([{"x": [1, None]}], pa.struct([("x", pa.list_(pa.int8()))])),
        "long": pa.array(["b"], pa.large_string()),
        "choice_probs": pa.array([0.5], pa.float32()),
        "before_completion": pa.array(["c"], pa.string()),
    }
    (shard,) = rows_of([("q", 0, "ok")], **cells).source.shards(1)
    own = ["request_id", "first_request_id", "first_sample_index", "first_completion"]
    assert shard.table.schema.names == [*own, "words", "box", "long", "first_choice_probs", "before_completion"]
    for name, column in cells.items():
        found = shard.table["first_choice_probs" if name == "choice_probs" else name]
        assert found.type == column.type
        assert found.to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("path", "columns", "prefix"),
    [
        ("out/answers", [], "answers_"),
        ("out/answers/", [], "answers_"),
        ("s3://bucket/runs/qwen-8b", [], "qwen_8b_"),
        ("s3://bucket", [], "bucket_"),
        ("2024.05", [], "job_2024_05_"),
        ("out/../answers/.", [], "answers_"),
        ("b/out", ["completion", "out_completion"], "out_out_"),
        ("c/out", ["out_completion", "out_out_messages"], "out_out_out_"),
        ("b/out", ["out_of_stock"], "out_"),
    ],
)
def test_the_prefix_is_the_folder_s_name_as_a_variable_of_jinja(path: str, columns: list[str], prefix: str) -> None:
    assert prefix_of(path, columns) == prefix
