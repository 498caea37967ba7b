"""A process that hangs while it loads ends, with its stack; one that loads slowly does not, however long it takes.

The processes are real, and so are their hangs. Workers are forked from the parent, so a patch in the parent changes them too.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from batchspec import run
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.data.runstate.heartbeats import BEAT_S, HeartbeatFiles
from batchspec.data.storage.open_store import open_store
from batchspec.distributed import group
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import RoundResult
from batchspec.engine.step import RoundShape
from batchspec.job.report import progress_bar
from batchspec.job.report.progress_bar import TICK_S, ProgressBar
from batchspec.job.supervise import watchdog
from batchspec.job.supervise.watchdog import LOAD_FACTOR, Watchdog
from batchspec.model.weights import Checkpoint
from batchspec.process import load_progress
from batchspec.process.load_progress import RESIDENT_BYTES, WINDOW_S, WRITTEN_BYTES, Activity, steps_of_download
from tests.helpers.engines import DEVICE, make_engine, packed, tiny_target
from tests.helpers.forked import run_python
from tests.helpers.runs import put, run_apart
from tests.job.crews import make_job, tokens

pytestmark = pytest.mark.second

ROWS = 12
LIMIT_S = 3
SLOW = 16
"""Number of tensors whose reading takes twice the limit together; the model has some more."""


def said_after(factor: float) -> str:
    limit = f"{factor * LIMIT_S:g} s ({factor:g} times cluster.watchdog_s)"
    return f"batchspec: loading made no progress for {limit}; the stacks above show"


SOON = said_after(1)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *make_job(tmp_path_factory.mktemp("job"), rows=ROWS, new_tokens=8, slots=2), "device=cpu",
        f"cluster.watchdog_s={LIMIT_S}",
    ]


@pytest.fixture(scope="module")
def expected(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run.main([*command, f"output.dir={out}", "cluster.watchdog_s=0"]) == 0
    return tokens(out, ROWS)


def is_process(number: int, rank: int) -> bool:
    """Whether this is the worker of this number, and the rank of it; a run without workers is worker 0."""
    own = (int(sys.argv[6]), int(sys.argv[1])) if sys.argv[0].endswith("worker.py") else (0, 0)
    return (number, rank) == own


def stuck() -> None:
    time.sleep(600)


def soon() -> None:
    """A patch: the limit of loading is that of a round. The first test shows that it is longer otherwise."""
    put(watchdog, "LOAD_FACTOR", 1.0)


def at_tensor(number: int, rank: int, act: Callable[[], None], every: bool = False) -> None:
    """A patch: this process of the run calls `act` before it reads its third tensor, or before each of the first SLOW."""
    stored, count = Checkpoint.stored, [0]

    def patched(self: Checkpoint, name: str) -> Tensor:
        count[0] += 1
        if is_process(number, rank) and (count[0] <= SLOW if every else count[0] == 3):
            act()
        return stored(self, name)

    Checkpoint.stored = patched  # type: ignore[method-assign]


def test_a_run_that_hangs_while_it_reads_weights_ends_with_its_stack(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    words = [*command, f"output.dir={tmp_path / 'out'}"]
    code, said = run_apart(words, tmp_path / "log", partial(at_tensor, 0, 0, stuck))
    assert code == 75, said
    assert said_after(LOAD_FACTOR) in said
    assert "in stuck" in said
    assert run.main([*words, "cluster.watchdog_s=0"]) == 0
    assert tokens(tmp_path / "out", ROWS) == expected


def a_while() -> None:
    time.sleep(2.0 * LIMIT_S / SLOW)


def slow(rank: int) -> None:
    """A patch: this rank loads for twice the limit."""
    soon()
    at_tensor(0, rank, a_while, every=True)


def test_a_load_that_takes_several_times_the_limit_goes_on_while_it_makes_progress(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """In a group, the other rank waits for the slow one for longer than the limit."""
    for name, more, rank in (("alone", [], 0), ("group", ["cluster.tensor_parallel=2"], 1)):
        began = time.monotonic()
        words = [*command, *more, f"output.dir={tmp_path / name}"]
        code, said = run_apart(words, tmp_path / "log", partial(slow, rank))
        assert code == 0, said
        assert time.monotonic() - began > 2.0 * LIMIT_S
        assert tokens(tmp_path / name, ROWS) == expected


def test_a_worker_that_hangs_while_it_loads_ends_and_the_other_does_the_job(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    words = [*command, f"output.dir={tmp_path / 'out'}", "cluster.workers=2"]
    code, said = run_apart(words, tmp_path / "log", wait_for_the_hanging_one)
    assert code == 0, said
    assert f"[1] {SOON}" in said
    assert "[1]   File" in said
    assert "in stuck" in said
    assert tokens(tmp_path / "out", ROWS) == expected


def wait_for_the_hanging_one() -> None:
    """A patch: worker 1 hangs, and worker 0 still loads when that one ends."""
    at_tensor(1, 0, stuck)
    slow(0)


def hangs_at_tensor(rank: int) -> None:
    """A patch: this rank hangs while it reads."""
    soon()
    at_tensor(0, rank, stuck)


def before(owner: Any, name: str, rank: int, first: Callable[[], object]) -> None:
    """Patch a module or a class: this rank calls `first` before the callable of this name."""
    call = getattr(owner, name)

    def patched(*rest: object, **named: object) -> object:
        if is_process(0, rank):
            first()
        return call(*rest, **named)

    put(owner, name, patched)


def hangs_in_engine(rank: int) -> None:
    """A patch: this rank never finishes its engine, as if a kernel or a graph were never done."""
    before(Engine, "__init__", rank, stuck)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def absent(rank: int) -> None:
    """A patch: this rank lives, but does not come to the rendezvous."""
    soon()
    before(group, "joined", rank, stuck)


def dead(rank: int) -> None:
    """A patch: this rank is killed before it comes to the rendezvous."""
    before(group, "joined", rank, killed)


def dead_in_rendezvous(rank: int) -> None:
    """A patch: this rank is killed when all have started, while the others wait for it in the library."""
    before(group, "GlooCollectives", rank, killed)
    put(watchdog, "LOST_S", 1.0)


@pytest.mark.parametrize(
    ("hang", "found", "frame"),
    [
        (partial(hangs_at_tensor, 1), SOON, "in stuck"),
        (partial(hangs_in_engine, 1), f"no round ended for {LIMIT_S} s", "in stuck"),  # the leader has begun its rounds
        (partial(absent, 1), SOON, "in stuck"),
        (partial(dead, 1), "[0] batchspec: rank 1 of this group is gone; ", "rank 1 of worker 0 was killed by SIGKILL; "),
        (partial(dead_in_rendezvous, 1), "a rank of this group is gone, and this one waits for it", "in init_process_group"),
    ],
    ids=["a follower reads", "a follower builds", "before the rendezvous", "dead before it", "dead in it"],
)
def test_a_rank_that_hangs_while_it_loads_ends_its_group(
    hang: Callable[[], None], found: str, frame: str, command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """The other rank waits for it in an exchange or in the rendezvous, which only the watchdog limits."""
    words = [*command, f"output.dir={tmp_path / 'out'}"]
    code, said = run_apart([*words, "cluster.tensor_parallel=2"], tmp_path / "log", hang)
    assert code == 75, said
    assert found in said
    assert frame in said
    assert run.main([*words, "cluster.watchdog_s=0"]) == 0
    assert tokens(tmp_path / "out", ROWS) == expected


@pytest.mark.parametrize(("limit_s", "loads_s"), [(0.2, 0.1), (10, 0)])
def test_a_load_that_hangs_while_it_holds_the_gil_ends_without_a_parent(limit_s: float, loads_s: float) -> None:
    """The watchdog's thread does not run either, in the second case from its start: before its first check, which is later than
    the end of the process here."""
    done = run_python(["-c", f"""import re, time
from batchspec.job.supervise import watchdog
watchdog.SAVE_S = 0.5
watchdog.LOAD_FACTOR, watchdog.NUM_CHECKS = (3.0, 20) if {limit_s} < 1 else (0.05, 1)
dog = watchdog.Watchdog({limit_s})
with dog.watching():
    dog.begin_loading()
    time.sleep({loads_s})
    re.match("(([a-z._0-9]+)+)+!", "model.layers.10.self_attn.q_proj" * 9)
"""])
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in <module>" in done.stderr


class Ended(Exception):
    """The watchdog has ended the process."""


def watched(dog: Watchdog, seconds: float, act: Callable[[], object] = lambda: None) -> bool:
    """Whether the watchdog ends the process within so many seconds, in which `act` is called again and again."""
    ended: list[str] = []
    dog._end = lambda why: (ended.append(why), dog.close())  # type: ignore[method-assign,assignment,func-returns-value]
    with dog.watching():
        ends = time.monotonic() + seconds
        while not ended and time.monotonic() < ends:
            act()
            time.sleep(0.01)
    return bool(ended)


@pytest.mark.parametrize("load", [True, False])
def test_steps_are_progress_of_a_load_but_not_of_a_round(load: bool) -> None:
    dog = Watchdog(0.5)
    (dog.begin_loading if load else dog.beat)()
    assert watched(dog, 2.5, load_progress.count_step) is not load
    if load:
        dog = Watchdog(0.5)
        dog.begin_loading()
        assert watched(dog, 60.0)


def test_a_round_that_is_prepared_is_a_step_before_its_capture() -> None:
    """Its first execution compiles kernels, which may take as long as many captures."""
    graphs = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE).executor.graphs
    before, steps = load_progress.num_steps(), list[int]()

    def capture(run: Callable[[], RoundResult]) -> tuple[Any, RoundResult]:
        steps.append(load_progress.num_steps() - before)
        return None, run()

    stand_in: Any = SimpleNamespace(capture=capture)
    graphs.captures, graphs.pool = True, stand_in
    graphs.prepare(RoundShape(num_rows, 0, SamplingMode()) for num_rows in (1, 2))
    assert steps == [1, 2]


def test_no_progress_is_expected_at_first_and_after_a_pause() -> None:
    dog = Watchdog(0.2)
    assert not watched(dog, 1.0)
    dog = Watchdog(0.2)
    dog.begin_loading()
    dog.pause()
    assert not watched(dog, 1.0)


def test_a_process_that_was_stopped_gets_the_whole_limit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours pass between two checks of the watchdog: the machine was suspended."""
    monkeypatch.setattr(load_progress, "PAUSE_S", 5.0)
    skipped = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + skipped[0]))
    for begin in ("begin_loading", "beat"):
        dog = Watchdog(3.0)
        getattr(dog, begin)()

        def suspend(began: float, before: float) -> None:
            if time.monotonic() > began + 0.5:
                skipped[0] = before + 7200.0

        assert not watched(dog, 2.0, partial(suspend, time.monotonic(), skipped[0]))


def test_a_process_that_waits_for_the_download_of_another_one_ends_only_if_that_one_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client waits for a file lock; it reads and writes nothing itself."""
    monkeypatch.setattr(load_progress, "LOOK_S", 0.1)
    folder = tmp_path / "blobs"
    dog = Watchdog(0.5)
    dog.begin_loading()
    with steps_of_download(folder):  # the folder does not exist yet
        folder.mkdir()
        with (folder / "c0ffee.incomplete").open("wb", buffering=0) as file:
            assert not watched(dog, 2.5, lambda: file.write(b"x"))
        dog = Watchdog(0.5)
        dog.begin_loading()
        assert watched(dog, 60.0)


COMPUTES = "import sys\nfor line in sys.stdin: print(sum(range(int(line))), flush=True)"
WAITS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTES!r}])"


@pytest.mark.parametrize("program", [COMPUTES, WAITS], ids=["child", "child of a child"])
def test_cpu_time_of_descendants_is_progress(program: str) -> None:
    """Such as children that admit the rows of the first shard, or compilers that a build tool runs."""
    activity = Activity()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for number, expected in ((3 * 10**7, True), (10, False)):
            while activity.made_progress():
                pass
            for _ in range(5):
                print(number, file=child.stdin, flush=True)
                assert child.stdout.readline()
            assert activity.made_progress() is expected
        child.stdin.close()


def test_cpu_time_of_many_short_children_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them lives when the watchdog looks. What this process needs to start them does not count here."""
    for name in ("READ_BYTES", "WRITTEN_BYTES", "RESIDENT_BYTES"):
        monkeypatch.setattr(load_progress, name, 1 << 60)
    activity = Activity()
    while activity.made_progress():
        pass
    for _ in range(5):
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    assert activity.made_progress()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the fake clock of `Activity`: only the test advances it. Of its counters only bytes read and written count."""
    seconds, read = [0.0], Activity._read_counters
    monkeypatch.setattr(Activity, "_read_counters", lambda self: [0, *read(self)[1:3], 0, 0])
    monkeypatch.setattr(load_progress, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


@pytest.mark.parametrize("every_s", [1, 30, 60])
def test_neither_the_progress_bar_nor_heartbeats_are_progress(
    every_s: int, passed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar on a terminal of 200 columns, and the heartbeats of 400 open shards, for half an hour."""
    monkeypatch.setattr(progress_bar, "_columns", lambda stream: 200)
    heartbeats = HeartbeatFiles(open_store(str(tmp_path), "_batchspec/work"), "a" * 32)
    with Path(os.devnull).open("w", encoding="utf-8") as terminal:
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        with ProgressBar(1_000_000, stream=terminal) as bar:
            bar.open_shards = [(shard, 1000) for shard in range(400)]
            heartbeats.write(bar.facts())  # imports modules
            activity, found = Activity(), 0
            while activity.made_progress():
                pass
            for second in range(1, 1801):
                passed[0] += 1
                if second % TICK_S == 0:
                    bar._draw()
                if second % BEAT_S == 0:
                    heartbeats.write(bar.facts())
                found += second % every_s == 0 and activity.made_progress()
    assert not found


@pytest.mark.parametrize("every_s", [1, 30, 60])
@pytest.mark.parametrize("reads", [True, False])
def test_ten_kilobytes_a_second_are_progress_at_any_time(every_s: int, reads: bool, passed: list[float]) -> None:
    activity, file = Activity(), os.open("/dev/zero", os.O_RDWR)
    assert activity.made_progress()
    last = 0
    for second in range(1, 601):
        passed[0] += 1
        _ = os.read(file, 10_000) if reads else os.write(file, bytes(10_000))
        if second % every_s == 0 and activity.made_progress():
            last = second
        assert second - last <= WINDOW_S
    os.close(file)


def test_bytes_read_and_written_are_progress_and_busy_threads_are_not(tmp_path: Path) -> None:
    """Bytes of a mapped file that come into memory, from the disk or not, bytes that are read, and bytes that are written."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(64 * RESIDENT_BYTES))
    activity = Activity()
    assert activity.made_progress()
    ends, total = time.monotonic() + 0.5, 0
    while time.monotonic() < ends:
        total += 1
    for _ in range(1000):  # its own reading of /proc would add up to more than READ_BYTES
        activity.made_progress()
    assert not activity.made_progress()
    with large.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for part in range(2):
            for place in range(part * 32 * RESIDENT_BYTES, (part + 1) * 32 * RESIDENT_BYTES, 4096):
                total += mapped[place]
            assert activity.made_progress()
            assert not activity.made_progress()
    large.read_bytes()
    assert activity.made_progress()
    (tmp_path / "copy").write_bytes(bytes(2 * WRITTEN_BYTES))
    assert activity.made_progress()
    assert not activity.made_progress()
    assert not Activity(-1).made_progress(), "of no process"
