"""Rows of one job come from one model: weights that differ in a single bit end a run before its first row."""

from __future__ import annotations

import os
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from batchspec import Engine, run
from batchspec.checkpoint import weight_sums
from batchspec.checkpoint.files import LocalFiles, stored_tensors
from batchspec.checkpoint.weight_files import weight_files
from batchspec.checkpoint.weight_sums import Summing, SumsOfJob, WeightSums, group_of
from batchspec.commands import verify
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.run_folder import WEIGHTS
from batchspec.data.storage.local_store import LocalStore
from batchspec.engine.loop.engine import Engine as BatchEngine
from batchspec.errors import CheckpointError, OutputError
from batchspec.model.layers.base import Shard
from batchspec.model.shard import part_of
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.job.test_crashes import short_of_memory
from tests.job.test_job import arguments, prompts, tokens

pytestmark = pytest.mark.second

CPU = torch.device("cpu")
EDITED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64)
    return make_tokenizer(folder)


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may edit."""
    return shutil.copytree(model, tmp_path / "own")


@pytest.fixture
def command(own: Path, tmp_path: Path) -> list[str]:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    return arguments(own, tmp_path / "prompts.parquet", tmp_path / "out", "decode.max_new_tokens=6")


def files_of(out: Path) -> dict[Path, bytes]:
    """The files of an output folder, without the notes of how each run ended."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.parent.name != "progress"}


def flip(folder: Path, name: str, place: int, bit: int = 0) -> None:
    """Change one bit of a tensor, `place` bytes after its first."""
    tensor = stored_tensors(LocalFiles(folder))[name]
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.start + place)
        (byte,) = file.read(1)
        file.seek(tensor.start + place)
        file.write(bytes([byte ^ 1 << bit]))


def edit_unseen(folder: Path, name: str = EDITED) -> None:
    """Change a number of a tensor in its exponent, at a place that the job's fingerprint does not sample."""
    before = weight_files(folder)
    facts = before.fingerprint, before.tensors
    tensor = stored_tensors(LocalFiles(folder))[name]
    for place in range(7, tensor.end - tensor.start, 512):
        flip(folder, name, place, bit=4)
        if facts == (before.fingerprint, before.tensors):
            return
        flip(folder, name, place, bit=4)
    raise AssertionError(f"{name} is sampled everywhere")


def sums_of(folder: Path, spec: Any = None, dtype: torch.dtype = torch.float64, names: list[str] | None = None) -> WeightSums:
    """Of a checkpoint of which `names` are read first, in this order."""
    with Checkpoint(folder, spec or load_spec(folder), dtype=dtype, device=CPU, summed=True) as weights:
        for name in names or ():
            weights.tensor(name)
        return weights.sums()


# --- the sums


def test_a_sum_is_that_of_the_bytes_in_the_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sums, "PIECE_BYTES", 1000)
    expected = {}
    for name, tensor in stored_tensors(LocalFiles(own)).items():
        data = (own / tensor.file).read_bytes()[tensor.start : tensor.end]
        pieces = [sha256(data[start : start + 1000]).digest() for start in range(0, len(data), 1000)]
        expected[name] = sha256(f"{name} {sha256(b''.join(pieces)).hexdigest()}\n".encode()).hexdigest()
    assert sums_of(own).tensors == expected


def test_sums_depend_on_the_files_alone(model: Path) -> None:
    """Not on the dtype, on what is read first, on the number of threads, or on the part of the model that a process computes."""
    spec, known = load_spec(model), sums_of(model)
    assert len(known.tensors) == len(load_file(model / "model.safetensors"))
    assert sums_of(model, dtype=torch.float32) == known
    assert sums_of(model, names=[EDITED, "model.norm.weight"]) == known
    for rank in range(2):
        assert sums_of(model, part_of(spec, Shard(rank, 2)), names=[EDITED]) == known
    loaded = Target.load(model, spec, dtype=torch.float64, device=CPU, summed=True)
    assert loaded.weight_sums == known
    assert Target.load(model, spec, dtype=torch.float64, device=CPU).weight_sums is None


@given(data=st.data())
def test_any_bit_of_any_tensor_counts(data: st.DataObject) -> None:
    """Of all dtypes, of one number and of none, in pieces of any length, by any number of threads."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool])
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tensors = {
        name: torch.randint(0, 2, data.draw(shapes)).to(data.draw(dtypes)) for name in ("a", "layers.0.b", "layers.1.experts.2.c")
    }
    name = data.draw(st.sampled_from([name for name, tensor in tensors.items() if tensor.numel()] or ["none"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sums, "PIECE_BYTES", data.draw(st.integers(1, 40)))
        first, again = (summed(tensors, data.draw(st.integers(1, 3))) for _ in range(2))
        assert first == again
        if name != "none":
            bytes_of = tensors[name].reshape(-1).view(torch.uint8)
            bytes_of[data.draw(st.integers(0, len(bytes_of) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            assert first.differing(summed(tensors, 1)) == [group_of(name)]


def summed(tensors: dict[str, torch.Tensor], num_threads: int) -> WeightSums:
    summing = Summing(num_threads)
    for name, tensor in tensors.items():
        summing.begin(name, tensor)
    try:
        return summing.result()
    finally:
        summing.close()


def test_pieces_that_change_places_are_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sums, "PIECE_BYTES", 4)
    rows = torch.arange(8, dtype=torch.uint8)
    assert summed({"a": rows}, 1).differing(summed({"a": torch.cat((rows[4:], rows[:4]))}, 1)) == ["a"]
    assert summed({"a": rows, "b": rows + 1}, 1).differing(summed({"a": rows + 1, "b": rows}, 1)) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", "model.layers.3.mlp.experts.gate_up_proj_blocks"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_the_experts_of_a_layer_have_one_sum(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_edited_expert_is_found(family: str, tmp_path: Path) -> None:
    """Experts that are tensors of their own, and those that lie in one."""
    count: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32} if family == "qwen3_moe" else {"num_local_experts": 4}
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=2, num_experts_per_tok=2, **count)
    before = Target.load(folder, load_spec(folder), dtype=torch.float32, device=CPU, summed=True).weight_sums
    name = max(name for name in stored_tensors(LocalFiles(folder)) if "layers.1.mlp.experts" in name and "down_proj" in name)
    flip(folder, name, 100)
    after = Target.load(folder, load_spec(folder), dtype=torch.float32, device=CPU, summed=True).weight_sums
    assert before is not None
    assert after is not None
    assert before.differing(after) == [group_of(name)]


def test_a_file_of_sums_comes_back_and_shows_damage(model: Path) -> None:
    sums = WeightSums(tensors=sums_of(model).tensors, run="run 1")
    assert WeightSums.from_json(sums.to_json(), "here") == sums
    for wrong in (
        b"",
        b"{}",
        b'{"tensors": {}, "run": ""}',
        sums.to_json().replace(b'"run"', b'"who"'),
    ):
        with pytest.raises(OutputError, match=r"here is damaged \(.*restore it or use another output.dir"):
            WeightSums.from_json(wrong, "here")


def test_files_that_are_written_while_they_are_loaded_are_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded may be of two models, whatever its sums say; so on every rank of a group, which alone reads its part."""
    begin = Target.__init__

    def meanwhile(self: Target, *rest: Any, **named: Any) -> None:
        begin(self, *rest, **named)
        flip(own, EDITED, 0)
        os.utime(own / "model.safetensors", ns=(0, 12345))

    load_spec(own)
    monkeypatch.setattr(Target, "__init__", meanwhile)
    with pytest.raises(
        CheckpointError, match=r"own: the weight files were written or replaced while they were loaded; run the sa"
    ):
        Target.load(own, load_spec(own), dtype=torch.float64, device=CPU)


# --- in a job


def test_weights_that_no_sample_shows_to_be_edited_are_refused_before_a_row_is_written(
    own: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(command) == 0
    out = tmp_path / "out"
    for part in sorted((out / "data").iterdir())[1:]:
        part.unlink()
    before = files_of(out)
    capsys.readouterr()
    edit_unseen(own)
    assert run.main(command) == OutputError.exit_code
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(  # the paths are cut as much as one line asks for
        rf"batchspec: output\.dir /\S+ holds a job with other weights: {re.escape(EDITED)} "
        r"\(1 of \d+ tensors\) differs from those of run [0-9a-f]{8} on \S+ at \d{4}-\d\d-\d\d \d\d:\d\d UTC "
        r"\(model\.path=/\S+\); give that model, or another output\.dir",
        said,
    )
    assert files_of(out) == before
    with pytest.raises(OutputError, match="holds a job with other weights"):
        verify.main([str(out)])
    shutil.rmtree(out)
    assert run.main(command) == 0  # as a job of its own


def test_a_retry_with_other_weights_is_refused_before_it_begins(
    own: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(command) == 0
    edit_unseen(own)
    assert run.main([*command[:-1], "decode.max_new_tokens=9", "resume=length"]) == OutputError.exit_code
    assert "holds a job with other weights" in capsys.readouterr().err
    assert not (tmp_path / "out/_batchspec/retry").exists()


def test_the_same_weights_elsewhere_go_on(model: Path, command: list[str], tmp_path: Path) -> None:
    """Another path, another process that wrote the files, a link."""
    assert run.main(command) == 0
    whole, kept = tokens(tmp_path / "out"), (tmp_path / "out" / WEIGHTS).read_bytes()
    next((tmp_path / "out/data").iterdir()).unlink()
    link = tmp_path / "link"
    link.mkdir()
    for file in model.iterdir():
        (link / file.name).symlink_to(file)
    assert run.main([f"model.path={link}", *command[1:]]) == 0
    assert tokens(tmp_path / "out") == whole
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == kept


@pytest.mark.parametrize("method", ["link", "rename"])
def test_of_two_runs_that_begin_together_with_other_weights_the_second_is_refused(
    method: str,
    own: Path,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both have loaded their copies before one can keep its sums. Without hard links the second may even replace them."""
    first = sums_of(own)
    edit_unseen(own)
    theirs = WeightSums(tensors=first.tensors, run="run a1b2c3d4").to_json()
    put = OutputFolder._put_own

    def raced(self: OutputFolder, name: str, data: bytes, *, once: bool = False) -> None:
        if name == WEIGHTS and method == "link":
            put(self, name, theirs, once=True)
        put(self, name, data, once=once)

    def settle(seconds: float) -> None:
        (tmp_path / "out" / WEIGHTS).write_bytes(theirs)  # by a run that looked for the file before this one put its own

    monkeypatch.setattr(OutputFolder, "_put_own", raced)
    monkeypatch.setattr("batchspec.data.runstate.run_folder.time.sleep", settle)
    if method == "rename":
        monkeypatch.setattr(LocalStore, "probe", lambda store: setattr(store, "method", "rename"))
    assert run.main(command) == OutputError.exit_code
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{EDITED} (1 of " in said
    assert "from those of run a1b2c3d4;" in said
    out = tmp_path / "out"
    assert not [*out.glob("data/*"), *out.glob("_batchspec/journal/*")]
    assert (out / WEIGHTS).read_bytes() == theirs


def test_a_job_with_rows_whose_sums_are_lost_or_damaged_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(command) == 0
    sums, kept = tmp_path / "out" / WEIGHTS, (tmp_path / "out" / WEIGHTS).read_bytes()
    sums.unlink()
    assert run.main(command) == 0  # a complete job has nothing to compare
    next((tmp_path / "out/data").iterdir()).unlink()
    capsys.readouterr()
    assert run.main(command) == OutputError.exit_code
    assert f"{sums} is missing, so that the weights cannot be compared" in capsys.readouterr().err
    with pytest.raises(OutputError, match="is missing"):
        verify.main([str(tmp_path / "out")])
    sums.write_bytes(b"{")
    assert run.main(command) == OutputError.exit_code
    assert f"{WEIGHTS} is damaged" in capsys.readouterr().err
    sums.write_bytes(kept)
    assert run.main(command) == 0


def test_weights_that_are_edited_during_a_run_are_not_loaded_for_a_smaller_batch(
    own: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When memory runs out the weights are read again. What was decoded before is kept, and goes on with the right ones."""
    assert run.main([*command, f"output.dir={tmp_path / 'whole'}"]) == 0
    end, before = BatchEngine.unfinished, (own / "model.safetensors").read_bytes()

    def edited(self: BatchEngine) -> Any:
        edit_unseen(own)
        return end(self)

    with monkeypatch.context() as patch:
        short_of_memory(patch, iter([6]))
        patch.setattr(BatchEngine, "unfinished", edited)
        assert run.main(command) == OutputError.exit_code
    said = capsys.readouterr().err
    assert "going on with a smaller batch" in said
    assert f"holds a job with other weights: {EDITED}" in said.splitlines()[-1]
    (own / "model.safetensors").write_bytes(before)
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == tokens(tmp_path / "whole")


def test_dummy_weights_and_a_drafters_are_not_compared(
    own: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main([*command, "model.load_format=dummy", f"output.dir={tmp_path / 'dummy'}"]) == 0
    assert not (tmp_path / "dummy" / WEIGHTS).exists()
    small = make_tokenizer(make_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1, dtype=torch.float64))
    drafts = [*command, "draft=pard", f"draft.path={small}"]
    assert run.main(drafts) == 0
    whole = tokens(tmp_path / "out")
    next((tmp_path / "out/data").iterdir()).unlink()
    flip(small, "model.norm.weight", 6)
    assert run.main(drafts) == 0
    assert tokens(tmp_path / "out") == whole


def test_an_engine_without_an_output_folder_computes_no_sums(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Summing, "__init__", lambda *_: pytest.fail("sums of weights that nothing is compared with"))
    with Engine({"model.path": str(own), "decode.max_new_tokens": 2}) as engine:
        engine.load_weights(own)
        assert engine.generate(pl.DataFrame({"prompt": ["Say it"]})).height == 1


def test_all_tensors_may_differ() -> None:
    kept = WeightSums(tensors={f"t{i}": "a" for i in range(7)}, run="run 1 (model.path=old)")
    job = SumsOfJob(where="out", kept=kept)
    job.check(kept)
    with pytest.raises(OutputError, match=r"weights: t0, t1 and 5 more \(7 of 7 tensors\) differ from those of run 1"):
        job.check(WeightSums(tensors={f"t{i}": "b" for i in range(7)}))
    SumsOfJob(where="out").check(kept)


def test_samples_are_kept_as_an_early_refusal(own: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is loaded, of most other models."""
    assert run.main(command) == 0
    tensors = load_file(own / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, own / "model.safetensors")
    assert run.main(command) == OutputError.exit_code
    said = capsys.readouterr().err.splitlines()
    assert "model.weights" in said[-1]
