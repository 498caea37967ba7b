"""The command line of `python -m batchspec.run`: what is composed, what is refused, and with which exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from batchspec import run
from batchspec.config.compose import _sweep_folder, compose
from batchspec.config.reference import options
from batchspec.config.schema import RunConfig
from batchspec.data.runstate.heartbeat_writer import HeartbeatWriter
from batchspec.errors import BatchspecError, ConfigError, InputError, Interrupted, StorageError
from batchspec.job.supervise.watchdog import Watchdog

GIVEN = ["model.path=m", "input.path=i.parquet", "output.dir=o"]


class Jobs:
    """In place of batchspec.job.run_job: keeps the configurations it is run with."""

    def __init__(self) -> None:
        self.ran: list[RunConfig] = []
        self.does: Callable[[RunConfig], None] = lambda config: None

    def run_job(
        self, config: RunConfig, group: None = None, watchdog: Watchdog | None = None, heartbeat: HeartbeatWriter | None = None
    ) -> None:
        assert heartbeat is not None, "it begins before anything is imported"
        assert watchdog is not None, "it watches before anything is loaded"
        self.ran.append(config)
        self.does(config)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs()
    module = ModuleType("batchspec.job.run_job")
    module.run_job = made.run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batchspec.job.run_job", module)
    monkeypatch.setattr("batchspec.data.dataset.input_paths.check_exist", lambda path: None)  # the inputs are names only
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # or the one that was looked up before
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield made
    GlobalHydra.instance().clear()
    assert list((tmp_path / "cwd").iterdir()) == [], "composing writes nothing into the working directory"


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("batchspec: ")
    return said.removeprefix("batchspec: ").strip()


def test_a_recipe_is_composed_from_all_groups_and_run_once(jobs: Jobs) -> None:
    assert run.main(["+job=reasoning_8k", "model.path=m", "input.path=i", "decode.seed=7"]) == 0
    (config,) = jobs.ran
    assert (config.model.max_len, config.decode.max_new_tokens) == (11264, 3072)
    assert (config.decode.temperature, config.decode.top_p, config.decode.seed) == (0.6, 0.95, 7)
    assert (config.draft.name, config.output.dir) == ("lookup", "./out/reasoning_8k")


def test_a_recipe_drafts_in_parallel_by_default_if_the_head_can(jobs: Jobs) -> None:
    head = ["model.path=m", "input.path=i", "draft=eagle3", "draft.path=h"]
    for words in ([], ["draft.parallel=true"], ["draft.parallel=false"]):
        assert run.main(["+job=reasoning_8k", *head, *words]) == 0
    assert [config.draft.parallel for config in jobs.ran] == ["auto", True, False]


def test_the_demo_has_everything_that_a_run_needs(jobs: Jobs) -> None:
    assert run.main(["+job=demo"]) == 0
    (config,) = jobs.ran
    assert config.model.path == "smollm2-135m"
    assert Path(config.input.path).is_file()
    assert (config.output.dir, config.output.token_ids, config.output.prompt_ids) == ("./out/demo", True, True)
    assert (config.model.dtype, config.model.max_len) == ("float32", 2048)


def test_a_plain_command_line_is_composed_without_hydra_main_and_gives_the_same(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[object] = []
    main = hydra.main

    def counting(**keys: Any) -> Any:
        began.append(keys)
        return main(**keys)

    monkeypatch.setattr(hydra, "main", counting)
    assert run.main(["+job=demo", "input.limit=4"]) == 0
    assert not began
    assert run.main(["+job=demo", "input.limit=4", "hydra.verbose=false"]) == 0
    assert len(began) == 1
    plain, through_hydra = jobs.ran
    assert plain.input.limit == 4
    assert plain == through_hydra


def test_the_variable_for_whole_errors_of_hydra_shows_them(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(HydraException, match=r"Could not override 'model\.pth'"):
        run.main(["model.pth=x"])


@pytest.mark.parametrize("name", [name for name in options()["model"] if name != "checkpoint"])
def test_a_model_of_the_package_is_the_same_by_group_and_by_path(name: str, jobs: Jobs) -> None:
    for word in (f"model={name}", f"model.path={name}"):
        assert run.main([word, "input.path=i", "output.dir=o"]) == 0
    by_group, by_path = jobs.ran
    assert by_group == by_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "model.path is required; give model.path="),
        (["decode.max_tokns=3"], "decode.max_tokns is not a key of the configuration; did you mean decode.max_new_tokens?"),
        (["+typo=1"], "typo is not a key of the configuration"),
        (["temperature=1"], "temperature is not a key of the configuration; did you mean decode.temperature?"),
        (["decode.max_new_tokens=abc"], "decode.max_new_tokens=abc must be a whole number, without point, exponent or unit; "
         "write decode.max_new_tokens=NUMBER"),
        (["decode.max_new_tokens=1e3"], "decode.max_new_tokens=1000.0 must be a whole number, without point, exponent or "
         "unit; write decode.max_new_tokens=1000"),
        (["decode.temperature="], "decode.temperature= must be a number, without a unit; write decode.temperature=NUMBER"),
        (["decode.temperature=0,7"], "several values; `-m` runs one job for each; a number has a point, decode.temperature=0.7"),
        (["packing.memory_gb=10GB"], "packing.memory_gb=10GB must be a number, without a unit; write packing.memory_gb=NUMBER"),
        ([*GIVEN, "decode.stop_ids=END"], "decode.stop_ids[0]=END must be a whole number, without point, exponent or unit; "
         "write 'decode.stop_ids=[2,151645]'"),
        ([*GIVEN, "draft.synthetic=often"], "draft.synthetic[0]=often must be a number, without a unit; write "
         "'draft.synthetic=[0.8,0.6]'"),
        ([*GIVEN, "decode.choice=positive"], "decode.choice=['positive'] allows one answer alone; list all allowed ones, "
         "'decode.choice=[positive,negative]', or remove the key"),
        ([*GIVEN, "decode.choice=[a,a]"], "decode.choice=['a', 'a'] allows one answer alone; list all"),
        ([*GIVEN, "output.passthrough=id"], "output.passthrough='id' must be all, none or a list of columns; write "
         "'output.passthrough=[COLUMN,COLUMN]'"),
        ([*GIVEN, "output.passthrough=id,answer"], "several values; `-m` runs one job for each; a list is "
         "'output.passthrough=[id,answer]'"),
        (["decode.n=1,2"], "decode.n=1,2 gives several values; `-m` runs one job for each"),
        ([*GIVEN, "model.think_tokens=x"], "model.think_tokens='x' must be auto, none, [begin,end] or [end]; write "
         "'model.think_tokens=[<think>,</think>]'"),
        ([*GIVEN, "decode.logit_bias=x"], "decode.logit_bias must be a map of token ids to numbers, not 'x'; write "
         "'decode.logit_bias={1734: -100}'"),
        (["decode.temperature=null"], "decode.temperature=null: it must have a value; give one, or leave the key out"),
        ([*GIVEN, "model.adapters={a:[1]}"], "model.adapters={a: [1]} must be a name and a folder; write "
         "'model.adapters={NAME: FOLDER}'"),
        ([*GIVEN, "model.adapters={a:null}"], "model.adapters.a=null: it must have a value"),
        ([*GIVEN, "decode.stop_ids={a:1}"], "decode.stop_ids=[{'a': 1}] must be a list of plain values; write "
         "'decode.stop_ids=[2,151645]'"),
        ([*GIVEN, "decode.stop=[[a]]"], "decode.stop=[['a']] must be a list of plain values; write 'decode.stop=[TEXT,TEXT]'"),
        ([*GIVEN, "decode.stop_ids=[null]"], "decode.stop_ids=[None] must be a list of plain values"),
        ([*GIVEN, "decode.choice=[true,false]"], "decode.choice: True must be text, and its original spelling is lost; quote it, "
         "\"decode.choice=['TEXT']\""),
        ([*GIVEN, "decode.stop=1e3"], "decode.stop: 1000.0 must be text"),
        ([*GIVEN, "cluster.workers=99999"], "cluster.workers=99999 must be auto or in 1 .. 128; auto is one a GPU"),
        ([*GIVEN, "cluster.tensor_parallel=[2]"], "cluster.tensor_parallel=[2] must be one value; "),
        (["decode.ignore_eos=maybe"], "decode.ignore_eos=maybe must be true or false; write decode.ignore_eos=true"),
        ([*GIVEN, "output.shard_rows=0"], "output.shard_rows=0 must be in 1 .. 10000000; null lets batchspec choose"),
        (
            ["draft=lokup"],
            "draft=lokup is not a choice of the group draft; did you mean lookup? choices: auto, block, eagle3, hybrid",
        ),
        (
            [*GIVEN, "draft=pard"],
            "draft=pard needs draft.path: the folder or hub id of a small model with the target's tokenizer",
        ),
        (
            ["+job=dmeo"],
            "job=dmeo is not a choice of the group job; did you mean demo? choices: caption, demo, demo_images, label, "
            "nemotron_nano, ocr, reasoning_35b, reasoning_8k; a "
            "recipe of your own is FOLDER/job/dmeo.yaml with --config-dir FOLDER",
        ),
        (["job=demo"], "write +job="),
        (["=3"], "cannot read the override '=3'; write key=value"),
        (["model=null"], "model=null is not a choice of the group model; choices: checkpoint, smollm2-135m"),
        (["draft=false"], "draft=false is not a choice of the group draft; choices: auto, block, eagle3"),
        (["resume=1"], "resume=1 is not a choice of the group resume; choices: completed"),
        (["draft=[lookup,none]"], "draft=[lookup,none] is not a choice of the group draft; choices: auto, block, eagle3"),
        (["model=Qwen/Qwen3-8B"], "of the group model; a path is model.path=Qwen/Qwen3-8B; choices: checkpoint"),
        (["input=data.parquet"], "of the group input; a path is input.path=data.parquet; choices: messages"),
        (
            ["model.path=a,b"],
            "model.path=a,b gives several values; `-m` runs one job for each; one value with a comma is \"model.path='a,b'\"",
        ),
        (["decode=greedy,sampled"], "decode=greedy,sampled gives several values; `-m` runs one job for each"),
        (["+decode.n=2"], "decode.n is a key of the configuration; write decode.n=... without the +"),
        (["+draft=none"], "draft is given twice; write draft=... without the +"),
        (["~decode.n"], "decode.n: it cannot be removed; write decode.n=..."),
        (["~decode.m"], "decode.m is not a key of the configuration"),
        (["input.columns=3"], "input.columns=3 must be a map; write 'input.columns={prompt: COLUMN}'"),
        (["input.columns=prompt"], "input.columns=prompt must be a map; write 'input.columns={prompt: COLUMN}'"),
        (["input.columns=[a]"], "input.columns must be a map; write 'input.columns={prompt: COLUMN}'"),
        (["input.columns.prompt=[a]"], "input.columns.prompt=['a'] must be text; write input.columns.prompt=TEXT"),
        (["input.template_kwargs=x"], "input.template_kwargs=x must be a map; write 'input.template_kwargs={NAME: VALUE}'"),
        (["model.adapters=x"], "model.adapters=x must be a map; write 'model.adapters={NAME: FOLDER}'"),
        (["decode.choice=[positive"], "cannot read the override 'decode.choice=[positive'; write "
         "'decode.choice=[positive,negative]', and quote what holds spaces or brackets"),
        (["draft.tree=4"], "draft.tree: it is a group of keys; write draft.tree.KEY=..."),
        (["model.path=m", "input.path=i", "output.dir="], "output.dir is required; give output.dir="),
        (["decode.stop=["], "cannot read the override 'decode.stop=['"),
        (["--config-dir", "nowhere"], "nowhere is not a folder; correct the path"),
        (["--job", "demo"], "--job is not an option; keys are written without dashes"),
        ([*GIVEN, "decode.top_p=2"], "decode.top_p=2.0 must be above 0 and at most 1"),
        ([*GIVEN, "draft.parallel=true"], "draft.parallel=true is not used by draft=auto, only by draft=eagle3"),
        ([*GIVEN, "output.dir=${nope}"], "${nope} names no key; a variable of the environment is ${oc.env:nope}"),
        (["+job=reasoning_8k"], "model.path is required"),
        (["+job=reasoning_8k", "model.path=m"], "input.path is required"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    argv: list[str], said: str, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(argv) == 2
    assert said in line(capsys)
    assert jobs.ran == []


@pytest.mark.parametrize(("code", "kind", "said"), [
    (errno.EIO, StorageError, "Input/output error (EIO); run the same command again after the repair"),
    (errno.EACCES, ConfigError, "mine.yaml: Permission denied; correct the path or its permissions"),
    (errno.ENAMETOOLONG, ConfigError, "an override names an option that cannot be a file's name"),
])
def test_a_recipe_that_the_disk_does_not_give_is_no_wrong_override(
    code: int, kind: type[BatchspecError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "mine.yaml")

    monkeypatch.setattr("hydra.compose", fail)
    with pytest.raises(kind, match=re.escape(said)):
        compose(["+job=mine"])


def test_dictionaries_take_new_keys_without_a_plus(jobs: Jobs) -> None:
    columns = ["input.columns.prompt=text", "input.columns.messages=null"]
    assert run.main([*GIVEN, *columns, "input.template_kwargs.think=false"]) == 0
    assert jobs.ran[0].input.columns == {"prompt": "text", "messages": None}
    assert jobs.ran[0].input.template_kwargs == {"think": False}


def own_recipe(folder: Path, body: str) -> str:
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "mine.yaml").write_text("# @package _global_\n" + body)
    return str(folder)


def test_one_value_where_a_list_is_expected_is_a_list_in_a_recipe_too(jobs: Jobs, tmp_path: Path) -> None:
    folder = own_recipe(tmp_path / "mine", "decode: {stop: '</s>', stop_ids: 3}\n")
    assert run.main(["--config-dir", folder, "+job=mine", *GIVEN]) == 0
    assert (jobs.ran[0].decode.stop, jobs.ran[0].decode.stop_ids) == (["</s>"], [3])


def test_a_recipe_of_the_users_own_is_read_from_its_folder(jobs: Jobs, tmp_path: Path) -> None:
    body = "defaults:\n  - override /draft: none\nmodel: {path: m}\ninput: {path: i}\noutput: {dir: o}\ndecode: {n: 3}\n"
    folder = own_recipe(tmp_path / "mine", body)
    assert run.main(["--config-dir", folder, "+job=mine", "decode.seed=5"]) == 0
    assert (jobs.ran[0].draft.name, jobs.ran[0].decode.n, jobs.ran[0].decode.seed) == ("none", 3, 5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("decode: {max_tokns: 3}\n", "did you mean decode.max_new_tokens?"),
        ("decode: {n: two}\n", "decode.n"),
        ("decode: {\n", "mine.yaml"),
    ],
)
def test_mistakes_in_the_users_recipe_are_one_line_too(
    body: str, said: str, jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--config-dir", own_recipe(tmp_path / "mine", body), "+job=mine"]) == 2
    assert said in line(capsys)


@pytest.mark.parametrize(
    "body",
    [
        "decode: {n: 3}\n",
        "defaults: [override /decode: sampled]\ndecode: {n: 3}\n",
        "defaults: [/decode: sampled]\n",
        "# @package job\ndecode: {n: 3}\n",
        "# @package global\ndecode: {n: 3}\n",
        "",
    ],
)
def test_a_recipe_without_its_first_line_is_told_which(
    body: str, jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_recipe(tmp_path / "mine", "")
    (tmp_path / "mine/job/mine.yaml").write_text(body)
    assert run.main(["--config-dir", folder, "+job=mine", *GIVEN]) == 2
    assert "the keys of a recipe are those of a whole job; begin the file with the line `# @package _global_`" in line(capsys)


def test_an_option_of_another_program_is_answered_with_the_key(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*GIVEN, "--max-model-len", "4096"]) == 2
    assert line(capsys) == ("--max-model-len is not an option; keys are written without dashes; batchspec calls it model.max_len")


def test_an_error_of_the_job_is_one_line_with_its_exit_code(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(config: RunConfig) -> None:
        raise InputError("i.parquet does not exist")

    jobs.does = fails
    assert run.main(GIVEN) == 2
    assert line(capsys) == "i.parquet does not exist"


def test_a_crash_keeps_its_traceback_and_is_exit_code_1(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.does = lambda config: [][0]
    assert run.main(GIVEN) == 1
    assert "IndexError" in capsys.readouterr().err


def test_a_sweep_runs_every_job_and_leaves_no_folder(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(config: RunConfig) -> None:
        if config.draft.name == "none":
            raise InputError("no rows")

    jobs.does = fails
    argv = ["-m", "model.path=m", "input.path=i", "draft=none,lookup", "output.dir=out/${draft.name}"]
    assert run.main(argv) == 0
    assert [config.output.dir for config in jobs.ran] == ["out/none", "out/lookup"]
    assert line(capsys) == "no rows"


@pytest.mark.parametrize("sweep", [["-m"], ["--multi"], ["hydra.mode=MULTIRUN"]])
def test_a_sweep_writes_through_no_name_that_others_can_know(
    sweep: list[str], jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links under every name that the variables of the environment make would be written through, if any was used."""
    monkeypatch.setenv("USER", "me")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "multirun.yaml").write_text("theirs")
    for name in ("batchspec-me", "batchspec-sweep", "batchspec", "multirun"):
        (tmp_path / "tmp" / name).symlink_to(theirs)
    before = sorted(path.name for path in (tmp_path / "tmp").iterdir())
    folders: list[list[str]] = []
    jobs.does = lambda config: folders.append([path.name for path in (tmp_path / "tmp").iterdir() if not path.is_symlink()])
    assert run.main([*sweep, "model.path=m", "input.path=i", "draft=none,lookup", "output.dir=out/${draft.name}"]) == 0
    assert (theirs / "multirun.yaml").read_text() == "theirs"
    assert [path.name for path in theirs.iterdir()] == ["multirun.yaml"]
    assert len(folders) == 2
    assert folders[0] == folders[1] != []
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == before, "the sweep's own folder is gone"


def test_a_folder_for_the_sweep_that_the_user_names_is_taken(jobs: Jobs, tmp_path: Path) -> None:
    argv = ["-m", "model.path=m", "input.path=i", "draft=none,lookup", "output.dir=out/${draft.name}"]
    assert run.main([*argv, f"hydra.sweep.dir={tmp_path}/mine"]) == 0
    assert (tmp_path / "mine/multirun.yaml").is_file()


def test_a_sweep_through_submitit_keeps_its_files_in_a_folder_shared_with_the_nodes() -> None:
    words = ["hydra/launcher=submitit_slurm", "draft=none,lookup"]
    folder = "hydra.launcher.submitit_folder=.submitit/%j"
    with _sweep_folder(words, sweep=True) as more:
        assert more == ["hydra.sweep.dir=.submitit", folder]
    with _sweep_folder([*words, "hydra.launcher.submitit_folder=mine"], sweep=True) as more:
        assert more == ["hydra.sweep.dir=.submitit"]
    with _sweep_folder([*words, "hydra.sweep.dir=mine"], sweep=True) as more:
        assert more == []


def test_a_signal_ends_a_sweep(jobs: Jobs) -> None:
    def stopped(config: RunConfig) -> None:
        raise Interrupted("stopped by SIGTERM")

    jobs.does = stopped
    with pytest.raises(SystemExit) as caught:
        run.main(["-m", *GIVEN, "draft=none,lookup"])
    assert caught.value.code == 75
    assert len(jobs.ran) == 1


def test_help_shows_examples_groups_and_keys_and_runs_nothing(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["+job=demo", "-h"]):
        assert run.main(words) == 0
        said = capsys.readouterr().out
        assert said.count("batchspec run ") >= 5
        assert re.search(r"\n  job +caption, demo, demo_images, label, nemotron_nano, ocr, reasoning_35b, reasoning_8k\n", said)
        assert re.search(r"\n  decode\.max_new_tokens=1024 +Maximum number of output tokens of a completion\.\n", said)
    assert jobs.ran == []


def test_cfg_prints_the_configuration_and_runs_nothing(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--cfg", "job", "+job=demo"]) == 0
    assert "path: pkg://demo" in capsys.readouterr().out
    assert jobs.ran == []


def test_compose_gives_what_the_command_line_gives(jobs: Jobs, tmp_path: Path) -> None:
    folder = own_recipe(tmp_path / "mine", "model: {path: m}\ninput: {path: i}\noutput: {dir: o}\n")
    assert run.main(["--config-dir", folder, "+job=mine", "decode.n=2"]) == 0
    assert compose(["+job=mine", "decode.n=2", f"hydra.searchpath=[file://{folder}]"]) == jobs.ran[0]
    with pytest.raises(ConfigError, match="did you mean decode"):
        compose(["decode.max_tokns=3"])
    with pytest.raises(ConfigError, match=r"input\.path is required"):
        compose(["model.path=m"], require=("input.path",))
