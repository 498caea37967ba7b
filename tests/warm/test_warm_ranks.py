"""A warm engine whose model several processes compute: the rows of one process, and what becomes of it when a rank is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

import batchspec
from batchspec.distributed import rank_processes, silent_ranks
from batchspec.distributed.rank_ends import culprit
from batchspec.distributed.rank_processes import RankProcesses
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import BatchspecError, CapacityError, CheckpointError, ConfigError, DivergedError, EngineInUse, RankLost
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.records import Completion
from batchspec.request_stream import RequestStream
from batchspec.warm import ranks as ranks_module
from batchspec.warm import weights as weights_module
from batchspec.warm.messages import FROM_LEADER, TO_LEADER, Ask, Ended, Given, GoOn
from batchspec.warm.options import warm_config
from batchspec.warm.rank_process import Leader
from batchspec.warm.ranks import EngineOfRanks
from tests.helpers.engines import request
from tests.helpers.forked import ServedPopen, run_python
from tests.helpers.models import make_checkpoint
from tests.helpers.processes import lives, wait_for_end
from tests.helpers.streams import answers_of
from tests.warm.test_warm import model, other, rows, same, words

pytestmark = pytest.mark.second

__all__ = ["model", "other", "words"]

RANKS = ["cluster.tensor_parallel=2", "device=cpu"]
CHAT = [{"messages": [{"role": "user", "content": "Name a sea."}]}, {"messages": [{"role": "user", "content": "Name a river."}]}]


@pytest.fixture(scope="module", autouse=True)
def ranks_start_at_once() -> Iterator[None]:
    """They are forked, not started by an interpreter of their own, but for those of the engine whose process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "Popen", ServedPopen)
        yield


@pytest.fixture(scope="module")
def shared(ranks_start_at_once: None, words: list[str]) -> Iterator[batchspec.Engine]:
    with batchspec.Engine([*words, *RANKS]) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(words: list[str]) -> Iterator[batchspec.Engine]:
    with batchspec.Engine([*words, "device=cpu"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(alone: batchspec.Engine) -> pl.DataFrame:
    return alone.generate(rows())


def ranks_of(engine: batchspec.Engine) -> RankProcesses:
    assert engine._loaded is not None
    assert isinstance(engine._loaded.engine, EngineOfRanks)
    return engine._loaded.engine._group


def pids(engine: batchspec.Engine) -> list[int]:
    return [member.process.pid for member in ranks_of(engine).members]


def test_rows_are_those_of_one_process_call_after_call(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    first, second = shared.generate(rows()), shared.generate(rows().reverse())
    assert same(first, expected)
    by = ["request_id", "sample_index"]
    assert same(second.drop("row_index", "error").sort(by), expected.drop("row_index", "error").sort(by))
    assert shared.shape.num_slots == 3
    assert shared.totals.rounds > 0
    assert shared.totals.tokens >= sum(len(ids) for ids in expected["token_ids"] if ids is not None)


def test_many_rows_reach_the_leader_in_parts(shared: batchspec.Engine, alone: batchspec.Engine) -> None:
    many = {"prompt_ids": [[5 + i % 7, i % 3] for i in range(2 * ranks_module.REQUESTS)], "max_new_tokens": [2] * 64}
    assert same(shared.generate(many), alone.generate(many))


def test_the_leader_prefetches_only_requests_that_it_was_given() -> None:
    given = [request(i, [1], cap=1) for i in range(3)]
    answers: list[Any] = [
        GoOn(),
        Given(given[:2], [-1] * 2, [], False),
        Given([], [], [], False),
        Given(given[2:], [-1], [], True),
    ]
    sent: list[Any] = []
    ready: list[int] = []

    def steps(requests: RequestStream) -> Iterator[list[Completion]]:
        ready.append(requests.num_ready)
        for _ in answers_of(requests):
            ready.append(requests.num_ready)
        yield from ()

    pipe = SimpleNamespace(
        send_bytes=lambda data: sent.append(FROM_LEADER.decode(data)), recv_bytes=lambda: TO_LEADER.encode(answers.pop(0))
    )
    watchdog = SimpleNamespace(pause=lambda: None, beat=lambda: None)
    engine = SimpleNamespace(on_round=None, totals=EngineTotals(), steps=steps)
    job = SimpleNamespace(admission=SimpleNamespace(constraints=None))
    Leader(*cast(Any, (LoadedEngine(cast(Any, engine), cast(Any, job)), None, pipe, watchdog)))._run()
    assert ready == [0, 1, 0, 0, 0]
    assert [type(message) for message in sent] == [Ask, Ask, Ask, Ended]


def test_conversations_keep_their_prefixes_and_raise_what_next_turn_raises(
    shared: batchspec.Engine, alone: batchspec.Engine
) -> None:
    def next_turn(turn: Any) -> Any:
        return [*turn.messages, {"role": "user", "content": "And another?"}] if turn.number < 2 else None

    def fails(turn: Any) -> None:
        raise LookupError("no such tool")

    by = ["request_id", "turn"]
    assert same(shared.converse(CHAT, next_turn).sort(by), alone.converse(CHAT, next_turn).sort(by))
    with pytest.raises(LookupError, match="no such tool"):
        shared.converse(CHAT, fails)
    assert same(shared.generate(CHAT), alone.generate(CHAT))


HALF = "\ud83d"
"""Half of a surrogate pair."""


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        ({"stop": [HALF, "e"]}, None),
        ({"stop": HALF}, None),
        ({"choice": [HALF, "b"]}, "bad_schema"),
        ({"messages": [{"role": "user", "content": HALF}]}, "template_error"),
    ],
    ids=["stop strings", "a stop string", "a choice", "a prompt"],
)
def test_text_that_is_no_unicode_costs_its_turn_at_most(
    turn: dict[str, Any], code: str | None, shared: batchspec.Engine, alone: batchspec.Engine
) -> None:
    def next_turn(ended: Any) -> Any:
        chat = [*ended.messages, {"role": "user", "content": "And another?"}]
        return {"messages": chat, **turn} if ended.number < 1 else None

    found = shared.converse(CHAT, next_turn)
    assert same(found, alone.converse(CHAT, next_turn))
    assert [error and error["code"] for error in found["error"]] == [None, code] * 2


def test_a_prompt_of_bytes_that_are_no_text_is_an_error_row(shared: batchspec.Engine, alone: batchspec.Engine) -> None:
    """Arrow does not check the text of a table that is read from Parquet, or made of other programs' memory."""
    values, ends = b"a\xed\xa0\xbdhello", np.array([0, 4, 9], np.int32)
    table = pa.table({"prompt": pa.StringArray.from_buffers(2, pa.py_buffer(ends), pa.py_buffer(values))})
    found = shared.generate(table)
    assert same(found, alone.generate(table))
    assert [error and error["code"] for error in found["error"]] == ["bad_text", None]


def test_weights_in_a_folder_whose_name_is_no_text_are_refused(
    shared: batchspec.Engine, alone: batchspec.Engine, model: Path, tmp_path: Path, expected: pl.DataFrame
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "weights-\udcff"))
    said = r"load_weights='.*/weights-\\udcff' is not valid Unicode; rename the folder, in UTF-8"
    for engine in (shared, alone):
        with pytest.raises(CheckpointError, match=said):
            engine.load_weights(folder)
        assert same(engine.generate(rows()), expected)


def test_a_stream_that_is_closed_and_a_task_that_is_cancelled_free_the_engine(
    shared: batchspec.Engine, expected: pl.DataFrame
) -> None:
    with shared.stream(rows(40)) as stream:
        next(stream)
        with pytest.raises(EngineInUse, match="one call at a time"):
            shared.generate(rows())
    assert list(stream) == []
    rounds = []

    async def cancelled() -> None:
        async def long() -> None:
            async for _ in shared.stream({"prompt_ids": [[5], [6], [7]], "max_new_tokens": [90] * 3}):
                pass

        task, begun = asyncio.create_task(long()), shared.totals.rounds
        while shared.totals.rounds < begun + 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rounds.append(shared.totals.rounds - begun)

    asyncio.run(cancelled())
    assert rounds[0] < 80, "90 tokens take 89 rounds without drafts"
    assert same(shared.generate(rows()), expected)


def test_an_error_where_requests_are_made_ends_the_call_alone(
    shared: batchspec.Engine, expected: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(EngineOfRanks, "_given", broken)
        with pytest.raises(OSError, match="disk"):
            shared.generate(rows())
    assert same(shared.generate(rows()), expected)


@pytest.mark.parametrize("form", ["folder", "tensors", "tensors on disk, in parts"])
def test_swapped_weights_are_those_of_the_other_model_and_back(
    form: str, shared: batchspec.Engine, alone: batchspec.Engine, model: Path, other: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "disk" in form:
        monkeypatch.setattr(weights_module, "MEMORY", tmp_path / "nowhere")
        monkeypatch.setattr(weights_module, "PART_BYTES", 1 << 12)

    def source(folder: Path) -> Any:
        return folder if form == "folder" else load_file(folder / "model.safetensors")

    prompts = rows(3).with_columns(prompt=pl.col("prompt") + " and again")
    before = shared.generate(prompts)
    for engine in (shared, alone):
        engine.load_weights(source(other))
    swapped = shared.generate(prompts)
    assert same(swapped, alone.generate(prompts))
    assert not same(swapped, before)
    for engine in (shared, alone):
        engine.load_weights(source(model))
    assert same(shared.generate(prompts), before)


def test_weights_of_another_model_are_refused_before_a_rank_is_asked(
    shared: batchspec.Engine, expected: pl.DataFrame, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"config.json differs from that of model.path=.* in layers, rope"):
        shared.load_weights(make_checkpoint(tmp_path / "theta", "llama", dtype=torch.float64, rope_theta=77.0))
    tensors = load_file(model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing tensors: model\.norm\.weight"):
        shared.load_weights({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    assert same(shared.generate(rows()), expected)


@pytest.mark.slow
def test_scales_of_fp8_keys_and_values_are_those_of_the_new_weights(words: list[str], model: Path, other: Path) -> None:
    fp8 = [*words, "cache.dtype=fp8", "draft=none", "draft.path=null"]
    tensors = {
        name: 9 * tensor if "v_proj" in name else tensor for name, tensor in load_file(other / "model.safetensors").items()
    }
    with batchspec.Engine([*fp8, *RANKS]) as engine, batchspec.Engine([*fp8, "device=cpu"]) as one:
        for each in (engine, one):
            each.load_weights(tensors)
        found = zip(engine.generate(rows())["token_ids"], one.generate(rows())["token_ids"], strict=True)
        # A number next to a rounding boundary of e4m3 may fall on its other side, so few tokens may differ.
        assert sum(a is b is None or list(a) == list(b) for a, b in found) >= 8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_call_with_its_name_and_frees_the_others(rank: int, words: list[str]) -> None:
    engine = batchspec.Engine([*words, *RANKS])
    found, said = pids(engine), list[str]()

    def call() -> None:
        try:
            engine.generate({"prompt_ids": [[5], [6], [7]] * 20, "max_new_tokens": [90] * 60})
        except RankLost as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not engine.totals.rounds:
        thread.join(0.01)
    os.kill(found[rank], signal.SIGKILL)
    thread.join(120)
    assert said == [
        f"rank {rank} of this engine was killed by SIGKILL; what it said, and its stack if it had time for it, is on stderr; "
        "make another engine"
    ]
    wait_for_end(found)
    with pytest.raises(EngineInUse, match=rf"rank {rank} of this engine was killed by SIGKILL; the engine has ended"):
        engine.generate(rows())
    engine.close()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("diverge 1 9", DivergedError, r"the ranks of this group came to different hidden states within \d+ rounds"),
        pytest.param("oom 0 9", CapacityError, r"rank 0: out of memory \(CUDA out of .* lower packing", marks=pytest.mark.slow),
        pytest.param("oom 1 9", RankLost, "rank 1 of this engine ended with exit code 2", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_on_a_rank_is_raised_here(
    fault: str, error: type[BatchspecError], said: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("WARM", "1")
    monkeypatch.setattr(ranks_module, "PROGRAM", ("-m", "tests.distributed.rank_faults"))
    engine = batchspec.Engine([*words, *RANKS])
    found = pids(engine)
    with pytest.raises(error, match=said):
        engine.generate(rows(20))
    wait_for_end(found)
    with pytest.raises(EngineInUse, match="the engine has ended, make another one"):
        engine.load_weights({})


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ([75, 1], 1),
        ([75, -9], 1),
        ([1, -11, 75], 1),
        ([75, 75, None, 75], 2),
        ([2, None], 0),
        ([75, 75], 0),
    ],
)
def test_the_rank_that_is_named_is_the_one_that_ended_the_others(codes: list[int | None], rank: int) -> None:
    assert culprit(dict(enumerate(codes))) == rank


@pytest.mark.parametrize(
    ("codes", "silent", "waited", "rank"),
    [
        ([75, 75], [], [0], 1),
        ([None, None], [1], [], 1),
        ([75, None], [1], [1], 1),  # stopped while it waited for a message; the other one waited for a kernel
        ([None, 75], [], [0], 1),
        ([75, 2, None], [2], [0], 1),
        ([None, None], [], [0, 1], 0),
    ],
)
def test_of_ranks_that_ended_alike_the_one_that_did_not_run_or_wait_is_named(
    codes: list[int | None], silent: list[int], waited: list[int], rank: int
) -> None:
    assert culprit(dict(enumerate(codes)), silent=silent, waited=waited) == rank


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "watchdog_s", "how"),
    [("stop", 2.5, "hangs"), ("slow", 2.5, "hangs"), ("load", 0.7, "ended with exit code 75")],
    ids=["stopped, and the other waits", "stopped, and the other loads", "found by its own watchdog"],
)
def test_the_rank_that_hangs_while_it_loads_is_named(
    fault: str, watchdog_s: float, how: str, rank: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for it in an exchange; one that still loads is killed, as it does not learn of the loss."""
    monkeypatch.setattr(silent_ranks, "LATER_S", 0.5)
    if fault == "load":  # what the loss of the other rank does to its memory is progress to its watchdog, which begins again
        for module in (rank_processes, ranks_module):
            monkeypatch.setattr(module, "END_S", 30.0)
    monkeypatch.setenv("FAULT", f"{fault} {rank} 3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("WARM", "1")
    monkeypatch.setattr(ranks_module, "PROGRAM", ("-m", "tests.distributed.rank_faults"))
    with pytest.raises(RankLost, match=rf"^rank {rank} of this engine {how}; what it said"):
        batchspec.Engine([*words, *RANKS, f"cluster.watchdog_s={watchdog_s}"])


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_call_with_stacks(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    engine = batchspec.Engine([*words, *RANKS, "cluster.watchdog_s=2"])
    found = pids(engine)
    os.kill(found[1], signal.SIGSTOP)
    with pytest.raises(RankLost, match="rank 1 of this engine hangs"):
        engine.generate(rows())
    said = capfd.readouterr().err
    assert "no round ended for 2 s (cluster.watchdog_s); the stacks above show where it hangs" in said
    assert "the engine ends: make another one" in said
    wait_for_end(found)


def test_a_stopped_leader_ends_the_call(
    words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog does not run either, and the other rank only waits for its next message."""
    engine = batchspec.Engine([*words, *RANKS])
    found = pids(engine)
    silent = ranks_of(engine).silent
    assert silent._watchdog_s == 3600.0
    monkeypatch.setattr(silent, "_watchdog_s", 1.5)
    monkeypatch.setattr(silent_ranks, "LATER_S", 0.5)
    os.kill(found[0], signal.SIGSTOP)
    with pytest.raises(RankLost, match="rank 0 of this engine hangs"):
        engine.generate(rows())
    assert "Fatal Python error: Aborted" in capfd.readouterr().err
    wait_for_end(found)


def test_an_engine_that_is_dropped_or_whose_process_ends_leaves_no_rank(words: list[str]) -> None:
    engine = batchspec.Engine([*words, *RANKS])
    found = pids(engine)
    del engine
    gc.collect()
    wait_for_end(found)
    program = f"""
import batchspec, os
engine = batchspec.Engine({[*words, *RANKS]!r})
print(*[member.process.pid for member in engine._loaded.engine._group.members], flush=True)
os._exit(3)
"""
    done = run_python(["-c", program])
    assert done.returncode == 3
    wait_for_end([int(pid) for pid in done.stdout.split()])


def test_closing_ends_a_call_of_another_thread(words: list[str]) -> None:
    engine, said = batchspec.Engine([*words, *RANKS]), list[str]()
    found = pids(engine)

    def call() -> None:
        try:
            engine.generate({"prompt_ids": [[5]] * 40, "max_new_tokens": [90] * 40})
        except EngineInUse as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not engine.totals.rounds:
        thread.join(0.01)
    engine.close()
    thread.join(120)
    assert len(said) == 1
    assert "given up before its end" in said[0]
    assert not any(map(lives, found))
    with pytest.raises(EngineInUse, match="closed"):
        engine.generate(rows())


def test_what_cannot_be_cut_is_refused_before_a_process_is_started(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_start", None)
    with pytest.raises(
        ConfigError, match=r"num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel"
    ):
        batchspec.Engine([*words, "cluster.tensor_parallel=8", "device=cpu"])
    with pytest.raises(ConfigError, match=r"cluster.tensor_parallel=auto compares what rows would take, and there are none"):
        warm_config(["model.path=x", "cluster.tensor_parallel=auto"])
    with pytest.raises(ConfigError, match=r"cluster.tensor_parallel=3 must be"):
        warm_config(["model.path=x", "cluster.tensor_parallel=3"])


def test_what_the_leader_raises_while_it_loads_is_raised_here(words: list[str]) -> None:
    with pytest.raises(CapacityError, match=r"packing.memory_gb"):
        batchspec.Engine([*words, *RANKS, "packing.memory_gb=0.00001"])


def test_answers_follow_recursive_grammars(shared: batchspec.Engine, alone: batchspec.Engine) -> None:
    form = {"type": "grammar", "grammar": 'root ::= "a" root "b" | "c"'}
    table = pl.DataFrame({"prompt": [f"word{i}" for i in range(6)], "response_format": [json.dumps(form), None] * 3})
    found = shared.generate(table)
    assert same(found, alone.generate(table))
    assert all(set(text) <= set("abc") for text in found["completion"].gather_every(2))


def test_answers_follow_schemas_that_rows_share(
    shared: batchspec.Engine, alone: batchspec.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one schema are sent in parts, and share an automaton on the device all the same."""
    monkeypatch.setattr(ranks_module, "REQUESTS", 2)
    forms = [{"type": "json_schema", "json_schema": {"schema": {"enum": [f"a{i}", f"b{i}"]}}} for i in range(2)]
    table = pl.DataFrame(
        {
            "prompt": [f"word{i}" for i in range(9)],
            "response_format": [None if i % 3 == 2 else json.dumps(forms[i % 3]) for i in range(9)],
        }
    )
    given, sent = EngineOfRanks._given, list[int]()

    def counted(self: EngineOfRanks, requests: Any) -> Given:
        found = given(self, requests)
        sent.append(len(found.automata))
        return found

    monkeypatch.setattr(EngineOfRanks, "_given", counted)
    for _ in range(2):  # the numbers of automata begin anew
        found = shared.generate(table)
        assert same(found, alone.generate(table))
        for first in range(2):
            assert all(text in (f'"a{first}"', f'"b{first}"') for text in found["completion"].gather_every(3, first))
    assert sum(sent) == 4
