"""`batchspec plan` ends with the exit code of the run that follows it, and says why in the same words; `--json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec import cli
from batchspec.commands import planning
from batchspec.config.schema import OutputConfig
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import OutputError, StorageError
from batchspec.job.load import memory
from batchspec.job.runner import checked_run
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_jobs_quick

Patch = pytest.MonkeyPatch
ROWS = 6


class Lab(NamedTuple):
    """A job of ROWS rows in a folder of its own."""

    folder: Path
    model: Path
    patch: Patch

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def words(self) -> list[str]:
        return [
            f"model.path={self.model}", f"input.path={self.folder / 'in.parquet'}", f"output.dir={self.out}", "device=cpu",
            "draft=none", "decode.max_new_tokens=4", "output.shard_rows=2", "packing.max_num_seqs=2",
        ]

    def write(self, prompts: Sequence[str | None], ids: Sequence[str] | None = None) -> None:
        columns = {"id": [*ids] if ids else [*map(str, range(len(prompts)))], "prompt": pa.array([*prompts], pa.string())}
        pq.write_table(pa.table(columns), self.folder / "in.parquet")

    def run(self, *more: str) -> int:
        return cli.main(["run", *self.words, *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("plan_codes") / "model")
    return make_checkpoint(folder, "llama", num_hidden_layers=1, max_position_embeddings=64)


@pytest.fixture
def lab(model: Path, tmp_path: Path, monkeypatch: Patch) -> Lab:
    make_jobs_quick(monkeypatch)
    made = Lab(tmp_path, model, monkeypatch)
    made.write(["a", "b", "c"] * 2)
    return made


def complete(lab: Lab) -> None:
    assert lab.run() == 0


def complete_in_bf16(lab: Lab) -> None:
    assert lab.run("model.dtype=bfloat16") == 0


def complete_with_errors(lab: Lab) -> None:
    lab.write([None] * 4 + ["a"] * 2)
    assert lab.run("input.max_error_fraction=1") == 0


def other_job(lab: Lab) -> None:
    assert lab.run("decode.seed=1", "decode.temperature=1") == 0


def without_a_shard(lab: Lab) -> None:
    complete(lab)
    (lab.out / "data/part-00001.parquet").unlink()
    (lab.out / "README.md").unlink()


def damaged_sums(lab: Lab) -> None:
    without_a_shard(lab)
    (lab.out / "_batchspec/weights.json").write_text("[]")


def lost_sums(lab: Lab) -> None:
    without_a_shard(lab)
    (lab.out / "_batchspec/weights.json").unlink()


def damaged_manifest(lab: Lab) -> None:
    complete(lab)
    (lab.out / "_batchspec/manifest.json").write_text("{")


def foreign(lab: Lab) -> None:
    lab.out.mkdir()
    (lab.out / "thesis.tex").write_text("")


def a_file(lab: Lab) -> None:
    lab.out.write_text("")


def failing_store(lab: Lab) -> None:
    def fails(self: LocalStore) -> None:
        raise StorageError("the disk is on fire; put it out")

    lab.patch.setattr(LocalStore, "check_root", fails)


def little_memory(lab: Lab) -> None:
    lab.patch.setattr(memory, "total_memory", lambda device: 1)


def all_bad_and_little_memory(lab: Lab) -> None:
    lab.write([None] * ROWS)
    little_memory(lab)


def answers_there(lab: Lab) -> None:
    (lab.folder / "answers.jsonl").write_text("")


def nothing(lab: Lab) -> None:
    pass


def both(first: Callable[[Lab], None], second: Callable[[Lab], None]) -> Callable[[Lab], None]:
    def prepare(lab: Lab) -> None:
        first(lab)
        second(lab)

    return prepare


CASES: dict[str, tuple[Callable[[Lab], object], tuple[str, ...], int]] = {
    "good rows": (nothing, (), 0),
    "bad rows, fewer than are allowed": (lambda lab: lab.write([None] * 3 + ["a"] * 3), (), 0),
    "more bad rows": (lambda lab: lab.write([None] * 4 + ["a"] * 2), (), 3),
    "bad rows alone, all allowed": (lambda lab: lab.write([None] * ROWS), ("input.max_error_fraction=1",), 3),
    "a schema that no answer meets": (nothing, ('decode.schema={"type":"integer","minimum":2,"maximum":1}',), 2),
    "rows that are too long": (lambda lab: lab.write(["x" * 100] * 4 + ["a"] * 2), (), 3),
    "long rows skipped": (lambda lab: lab.write(["x" * 100] * 4 + ["a"] * 2), ("input.on_overlong=skip",), 0),
    "ids twice": (lambda lab: lab.write(["a", "b"], ids=["x", "x"]), (), 2),
    "an input that is cut off": (lambda lab: (lab.folder / "in.parquet").write_bytes(b"PAR1" * 10), (), 2),
    "no input": (lambda lab: (lab.folder / "in.parquet").unlink(), (), 2),
    "no adapter": (nothing, ("model.adapter=/nowhere",), 2),
    "no head": (nothing, ("draft=eagle3", "draft.path=/nowhere"), 2),
    "weights larger than the memory": (little_memory, (), 2),
    "too little memory, and no row to decode": (all_bad_and_little_memory, (), 2),
    "too few pages for a row": (nothing, ("packing.pages=1", "decode.max_new_tokens=40"), 2),
    "a complete job": (complete, (), 0),
    "a complete job, but no memory": (both(complete, little_memory), (), 0),
    "a complete job with error rows": (complete_with_errors, (), 3),
    "an unfinished job": (without_a_shard, (), 0),
    "an unfinished job whose sums of the weights are damaged": (damaged_sums, (), 2),
    "an unfinished job whose sums of the weights are lost": (lost_sums, (), 2),
    "a damaged manifest": (damaged_manifest, (), 2),
    "another job": (other_job, (), 2),
    "another job, to be deleted": (other_job, ("output.overwrite=true",), 0),
    "another job, and no memory": (both(other_job, little_memory), (), 2),
    "a folder of other files": (foreign, (), 2),
    "a file": (a_file, (), 2),
    "a place without folders": (nothing, ("output.dir=/proc/out",), 2),
    "a store that fails": (failing_store, (), 74),
    "a store that fails, and no memory": (both(failing_store, little_memory), (), 74),
    "a file of answers that is there": (answers_there, ("output.openai={folder}/answers.jsonl",), 2),
    "no job to extend": (nothing, ("resume=extend",), 2),
    "no job to retry": (nothing, ("resume=error",), 2),
    "a key that nothing knows": (nothing, ("decode.max_tokns=3",), 2),
}


QUICK = ("good rows", "more bad rows", "another job", "a complete job with error rows", "a store that fails", "a file")
"""One case of each kind; the others are of the second tier."""


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.second) for name in CASES])
def test_a_plan_ends_with_the_code_of_the_run_and_its_words(name: str, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, more, code = CASES[name]
    prepare(lab)
    more = tuple(word.format(folder=lab.folder) if word.startswith("output.openai") else word for word in more)
    capsys.readouterr()
    assert cli.main(["plan", *lab.words, *more, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    assert lab.run(*more) == code
    said = capsys.readouterr().err
    if code not in (0, 3) or name == "a complete job with error rows":
        assert said.splitlines()[-1].endswith(found["error"].replace("\n", "\\n"))
    elif code:
        assert "of these rows are error rows" in found["error"]
    else:
        assert found["error"] is None


@pytest.mark.second
def test_json_has_the_names_of_status_where_they_mean_the_same(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    without_a_shard(lab)
    capsys.readouterr()
    found: list[dict[str, Any]] = []
    for words in (["plan", *lab.words, "--json"], ["status", str(lab.out), "--json"]):
        assert cli.main(words) == 0
        found.append(json.loads(capsys.readouterr().out))
    planned, status = found
    same = ("path", "state", "rows", "rows_total", "shards", "shards_total", "completions", "completions_total")
    assert {name: planned[name] for name in same} == {name: status[name] for name in same}
    assert (planned["state"], planned["rows"], planned["shards_total"]) == ("stopped", 4, 3)
    assert {"tok_s", "left_s", "mean_acceptance_length"} < planned.keys() & status.keys()
    assert planned["left_s"] == pytest.approx((planned["prefill_s"] + planned["decode_s"]) / 3)


def test_an_error_is_json_too_and_one_line_on_stderr(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--card"], ["--card=H300"], ["decode.n=many"], ["--nope"]):
        assert cli.main(["plan", *lab.words, "--json", *more]) == 2
        said = capsys.readouterr()
        assert json.loads(said.out) == {"exit_code": 2, "error": said.err.removeprefix("batchspec: ").rstrip("\n")}


@pytest.mark.parametrize("command", ["status", "stats"])
def test_an_error_of_status_and_stats_is_json_too(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, str(tmp_path / "none"), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert json.loads(said.out) == {"exit_code": 2, "error": said.err.removeprefix("batchspec: ").rstrip("\n")}


@pytest.mark.parametrize(
    ("prepare", "code", "why"),
    [
        (complete_in_bf16, 0, None),
        (complete, 2, 'holds another job (model.dtype: "float32" -> "bfloat16"'),
        (foreign, 2, "is not a batchspec job"),
    ],
)
def test_a_plan_for_a_card_says_what_a_run_there_would_find_in_the_output_folder(
    prepare: Callable[[Lab], None], code: int, why: str | None, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(lab)
    capsys.readouterr()
    words = [word for word in lab.words if word != "device=cpu"]
    assert cli.main(["plan", "--card", "L40S", *words, "model.dtype=bfloat16", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["card"]) == (code, "L40S")
    assert found["error"] is None if why is None else why in found["error"]
    assert found["slots"] == 2, "its shape is told all the same"
    assert found["state"] == ("not begun" if code else "complete")


@pytest.mark.parametrize(("rates", "mean_length"), [("[0.6,0.3]", 1.9), ("[0.8,0.2,0.4,0.2]", 1.8)])
def test_a_plan_expects_the_acceptance_that_a_benchmark_makes_up(
    rates: str, mean_length: float, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two kinds of rows the mean."""
    words = [word for word in lab.words if word != "device=cpu" and not word.startswith("draft")]
    words += ["draft=lookup", "draft.num_speculative_tokens=2", "draft.adaptive=false", f"draft.synthetic={rates}"]
    assert cli.main(["plan", "--card", "L40S", *words, "model.dtype=bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_acceptance_length"] == pytest.approx(mean_length)


@pytest.mark.parametrize(("prepare", "code"), [(nothing, 0), (foreign, 2), (a_file, 2), (failing_store, 74), (other_job, 0)])
def test_a_plan_without_the_run_s_gpu_finds_what_any_gpu_would(
    prepare: Callable[[Lab], None], code: int, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a job in output.dir is the same depends on the GPU."""
    prepare(lab)
    capsys.readouterr()
    lab.patch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["plan", *lab.words, "device=cuda", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    assert (found["error"] is None) == (code == 0)
    assert found["state"] == (None if prepare is other_job else "not begun")
    assert found["rows_read"] == ROWS


def test_a_plan_for_a_card_asks_whether_the_push_would_be_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(output: OutputConfig, job: str) -> None:
        raise OutputError("the hub says no")

    lab.patch.setattr(checked_run, "check_target_key", refuses)
    lab.patch.setattr(planning, "check_push_key", lambda output: None)
    words = [word for word in lab.words if word != "device=cpu"]
    assert cli.main(["plan", "--card", "L40S", *words, "model.dtype=bfloat16", "output.push_to_hub=org/name", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "the hub says no"
