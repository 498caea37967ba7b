"""Several processes for one job from one command: a dead one is named, the others finish, signals and exit codes pass through."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchspec import run
from batchspec.cluster import crew, devices, workers
from batchspec.config.schema import RunConfig
from batchspec.distributed import rank_ends, rank_processes, silent_ranks
from batchspec.engine.rounds.round import Round
from batchspec.errors import ConfigError
from batchspec.process import load_progress
from tests.helpers.processes import ended, wait_for_end
from tests.helpers.runs import put, run_apart, start_apart
from tests.job.crews import commits_wait_for, journals, make_job, owners, tokens, wait_until, workers_of

pytestmark = pytest.mark.second

ROWS = 48


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_job(tmp_path_factory.mktemp("job"), rows=ROWS, new_tokens=60, slots=2)


@pytest.fixture(scope="module")
def expected(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run.main([*command, f"output.dir={out}"]) == 0
    return tokens(out, ROWS)


@pytest.mark.smoke("two workers of which one dies")
def test_when_one_of_two_workers_is_killed_the_other_completes_the_job(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log, go = tmp_path / "out", tmp_path / "log", tmp_path / "go"
    parent = start_apart([*command, f"output.dir={out}", "cluster.workers=2"], log, partial(commits_wait_for, go))
    wait_until(lambda: len(owners(out)) > 0, parent)
    os.kill(workers_of(parent)[1], signal.SIGKILL)
    go.touch()
    code, said = ended(parent), log.read_text()
    assert code == 0, said
    assert "batchspec: worker 1 was killed by SIGKILL; 1 other takes its shards over\n" in said
    assert tokens(out, ROWS) == expected


def test_after_a_signal_and_the_death_of_the_parent_the_job_is_completed(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log, go = tmp_path / "out", tmp_path / "log", tmp_path / "go"
    together = [*command, f"output.dir={out}", "cluster.workers=2"]
    parent = start_apart(together, log, partial(commits_wait_for, go))
    wait_until(lambda: len(owners(out)) == 2, parent)  # both have begun
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGUSR1)
    go.touch()
    code, said = ended(parent), log.read_text()
    assert code == 75, said
    assert len(re.findall(r"\[[01]\] batchspec: SIGUSR1: \d+ of 12 shards are committed", said)) == 2, said

    saved = journals(out)
    parent = start_apart([*together, "draft=lookup"], log)
    wait_until(lambda: len(owners(out)) == 2, parent)
    pids = workers_of(parent)
    parent.kill()
    ended(parent)
    wait_for_end(pids)
    assert journals(out) > saved
    assert run.main([*command, f"output.dir={out}"]) == 0
    assert tokens(out, ROWS) == expected


def supervised(monkeypatch: pytest.MonkeyPatch, program: str, count: int, **cluster: Any) -> int:
    """The parent's exit code over `count` workers that run `program`, which knows its `number`."""
    monkeypatch.setattr(crew, "PROGRAM", ("-c", f"import os, signal, sys, time; number = int(sys.argv[6]); {program}"))
    config = RunConfig()
    config.output.dir = "/nowhere"
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    return workers.supervise(config, [None] * count)


def test_an_error_that_all_workers_raise_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "print('note', number); print('batchspec: the input is empty'); sys.exit(2)"
    assert supervised(monkeypatch, program, 3) == 2
    said = capsys.readouterr().err
    assert said.count("batchspec: the input is empty") == 1
    assert sorted(line for line in said.splitlines() if "note" in line) == ["[0] note 0", "[1] note 1", "[2] note 2"]


@pytest.mark.parametrize(("count", "ranks"), [(3, 1), (4, 2)])
def test_a_worker_knows_how_many_there_are(
    count: int, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import json; print('there are', json.loads(sys.stdin.readline())['cluster']['workers'], flush=True)"
    assert supervised(monkeypatch, program, count, tensor_parallel=ranks) == 0
    assert capsys.readouterr().err.count(f"there are {count // ranks}\n") == count


def test_how_to_inspect_a_finished_job_is_said_once(command: list[str], tmp_path: Path) -> None:
    """Also where another folder was meant by the name, which the workers say in its short form."""
    for out in (f"{tmp_path}/./out/", f"{tmp_path}/out"):
        code, text = run_apart(
            [*command, f"output.dir={out}", "cluster.workers=2", "device=cpu", "input.limit=12"], tmp_path / "log"
        )
        said = [re.sub(r"^\[[01]\] ", "", line) for line in text.splitlines()]
        assert code == 0
        closing = [line for line in said if str(tmp_path / "out") in line]
        assert len(closing) == len(set(closing)) >= 3
        assert said.count(f"inspect it:  batchspec stats {tmp_path / 'out'}") == 1


def test_too_many_errors_in_one_worker_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"""root = {str(tmp_path)!r}
def told(*_):
    open(f'{{root}}/told {{number}}', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, told)
open(f'{{root}}/ready {{number}}', 'w').close()
while number == 1 and len(os.listdir(root)) < 3:
    time.sleep(0.01)
if number != 1:
    time.sleep(60)
sys.exit(3)"""
    assert supervised(monkeypatch, program, 3) == 3
    assert sorted(path.name for path in tmp_path.glob("told *")) == ["told 0", "told 2"]


def test_a_worker_that_does_not_heed_a_signal_is_killed_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert supervised(monkeypatch, program, 1, signal_s=2) == 75
    assert "worker 0 did not end within 1.5 s of a signal: killed" in capsys.readouterr().err


def test_a_crashed_worker_leaves_a_job_to_resume_and_a_bug_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)", 1) == 75
    assert "worker 0 was killed by SIGSEGV" in capfd.readouterr().err
    assert supervised(monkeypatch, "raise RuntimeError", 2) == 1


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([75, 75], 75), ([2, 2], 2), ([0, 75], 75), ([0, 3], 3), ([75, 1], 1), ([74, 1, 75], 74), ([75, 134], 75)],
)
def test_many_exit_codes_become_one(codes: list[int], code: int, tmp_path: Path) -> None:
    config = RunConfig()
    config.output.dir = str(tmp_path / "nothing there")
    assert workers.exit_code(codes, config) == code


def test_there_is_one_worker_a_visible_gpu_and_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0", "MIG-1", "5"])
    assert devices.devices_of(config) == ["0", "MIG-1", "5"]
    config.cluster.workers = 2
    assert devices.devices_of(config) == ["0", "MIG-1"]
    config.cluster.workers = 4
    with pytest.raises(ConfigError, match=r"cluster\.workers=4: this machine shows 3 GPUs"):
        devices.devices_of(config)
    config.device = "cpu"
    assert devices.devices_of(config) == [None] * 4
    config.cluster.workers = "auto"
    assert devices.devices_of(config) == [None]


def test_a_model_over_several_gpus_has_as_many_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    config.cluster.tensor_parallel = 2
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0", "1", "5", "6", "7"])
    assert devices.devices_of(config) == ["0", "1", "5", "6"]
    config.cluster.workers = 1
    assert devices.devices_of(config) == ["0", "1"]
    config.cluster.workers = 3
    with pytest.raises(ConfigError, match=r"cluster\.workers=3: this machine shows 5 GPUs, and a worker needs 2 of its own"):
        devices.devices_of(config)
    config.cluster.workers, config.cluster.tensor_parallel = "auto", 8
    with pytest.raises(ConfigError, match=r"cluster\.tensor_parallel=8: this machine shows 5 GPUs, and a model that is cut over"):
        devices.devices_of(config)
    config.device = "cpu"
    assert devices.devices_of(config) == [None] * 8


RANK = """from batchspec.distributed.channel import Channel
from batchspec.errors import RankLost
rank, ranks, handle = map(int, sys.argv[1:4])
end = Channel(handle, rank, ranks)
def wait_for_loss():
    try:
        end.receive() if rank else end.wait(lambda: False)
    except RankLost as error:
        print(error)
        sys.exit(75)
"""
"""The beginning of a program of a rank."""


@pytest.mark.parametrize(
    ("follower", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 75, "rank 1 of worker 0 was killed by SIGKILL; its group ends\n"),
        ("sys.exit(1)", 1, "rank 1 of worker 0 ended with exit code 1; its group ends\n"),
        ("sys.exit(0)", 75, "[0] rank 1 of this group is gone; run the same command again to go on\n"),
    ],
)
def test_when_a_rank_ends_its_group_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], follower: str, code: int, said: str
) -> None:
    program = f"\n{RANK}\nif rank:\n    {follower}\nwait_for_loss()"
    assert supervised(monkeypatch, program, 2, tensor_parallel=2) == code
    out = capsys.readouterr().err
    assert said in out
    assert "[0] rank 1 of this group is gone" in out


def test_when_the_leader_dies_its_group_ends_and_others_keep_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = f"""
{RANK}
if number == 0 and rank == 0:
    open('{tmp_path}/killed', 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
if number == 0:
    wait_for_loss()
while not os.path.exists('{tmp_path}/killed'):
    time.sleep(0.05)
time.sleep(1.0)  # the parent looks every 0.1 s
if rank == 0:
    end.send(b"the end")
else:
    assert end.receive() == b"the end"
open(f'{tmp_path}/{{number}} {{rank}}', 'w').close()"""
    supervised(monkeypatch, program, 4, tensor_parallel=2)
    out = capsys.readouterr().err
    assert "worker 0 was killed by SIGKILL; its group ends; 1 other takes its shards over\n" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1 0", "1 1", "killed"]
    assert "worker 1" not in out


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_rank_that_hangs_after_another_has_ended_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangs: int
) -> None:
    monkeypatch.setattr(crew, "LEADER_END_S", 0.3)
    for name in ("END_S", "STACKS_S"):
        monkeypatch.setattr(rank_processes, name, 0.3)
    hang = "import faulthandler; faulthandler.enable(); time.sleep(600)"
    program = f"\n{RANK}\nif rank == {hangs}:\n    {hang}\nos.kill(os.getpid(), signal.SIGKILL)"
    assert supervised(monkeypatch, program, 2, tensor_parallel=2) == 75
    said = capsys.readouterr().err
    assert f"rank {hangs} of worker 0 does not end: process " in said
    assert "has begun 0 of 0 steps and read 0 results; killed\n" in said
    assert f"[{'0.1' if hangs else '0'}] Fatal Python error: Aborted" in said


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_does_not_run_at_all_is_killed_and_shows_its_stack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: int
) -> None:
    """Its own watchdog does not run either. The other rank waits for it, as for a leader that has nothing to decode."""
    monkeypatch.setattr(silent_ranks, "LATER_S", 0.5)
    stop = "import faulthandler; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"
    program = f"\n{RANK}\nend.start_liveness_thread()\nif rank == {stopped}:\n    {stop}\nwait_for_loss()"
    assert supervised(monkeypatch, program, 2, tensor_parallel=2, watchdog_s=1.5) == 75
    said = capsys.readouterr().err
    assert re.search(
        rf"rank {stopped} of worker 0 has not run for more than 1\.5 s \(cluster\.watchdog_s\): process \d+ was stopped by a "
        r"signal, has begun 0 of 0 steps and read 0 results; killed\n",
        said,
    )
    assert f"[{'0.1' if stopped else '0'}] Fatal Python error: Aborted" in said
    assert f"rank {stopped} of this group is gone" in said


def silent_soon() -> None:
    """A patch: the parent finds a worker that does not run half a second after the limit. A worker that continues then, to print
    its stacks, takes that for a pause: its own watchdog, which would print them too, gives it the limit again.
    """
    put(silent_ranks, "LATER_S", 0.5)
    put(load_progress, "PAUSE_S", 2.0)


def holds_the_interpreter() -> None:
    """A patch: in its 20th round worker 1 calls a C function that holds the GIL, so that none of its threads runs."""
    silent_soon()
    run_round, count = Round.run, [0]

    def patched(self: Round, *rest: Any, **named: Any) -> Any:
        count[0] += 1
        if sys.argv[6] == "1" and count[0] == 20:
            ctypes.PyDLL(None).sleep(600)
        return run_round(self, *rest, **named)

    Round.run = patched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("patch", "state"), [(silent_soon, "was stopped by a signal"), (holds_the_interpreter, "waits")], ids=["SIGSTOP", "lock"]
)
def test_a_worker_that_does_not_run_at_all_is_killed_and_the_other_does_its_shards(
    patch: Callable[[], None], state: str, command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    words = [*command, f"output.dir={out}", "device=cpu", "cluster.workers=2", "cluster.watchdog_s=4"]
    parent = start_apart(words, log, patch)
    if patch is silent_soon:
        wait_until(lambda: len(owners(out)) == 2, parent)  # both have begun
        os.kill(workers_of(parent)[1], signal.SIGSTOP)
    code, said = ended(parent), log.read_text()
    assert code == 0, said
    assert re.search(
        rf"batchspec: worker 1 has not run for more than 4 s \(cluster\.watchdog_s\): process \d+ {state}; killed; 1 other takes "
        r"its shards over\n",
        said,
    ), said
    assert "[1] Fatal Python error: Aborted" in said  # its stacks
    assert tokens(out, ROWS) == expected


def test_a_job_whose_only_worker_does_not_run_is_resumed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as in a task of Slurm. It is found even if it was stopped before it had imported anything."""
    monkeypatch.setattr(silent_ranks, "LATER_S", 0.2)
    monkeypatch.setattr(silent_ranks, "START_S", 1.0)
    assert supervised(monkeypatch, "os.kill(os.getpid(), signal.SIGSTOP)", 1, watchdog_s=1.0) == 75
    assert "worker 0 has not run for more than 1 s (cluster.watchdog_s)" in capfd.readouterr().err


class Unkillable(subprocess.Popen[str]):
    """A process that no signal ends, such as one that waits for a disk that never answers."""

    def send_signal(self, sig: int) -> None:
        assert sig in (signal.SIGABRT, signal.SIGCONT, signal.SIGKILL)


def test_the_command_ends_although_sigkill_does_not_end_a_worker(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silent_ranks, "LATER_S", 0.2)
    monkeypatch.setattr(silent_ranks, "START_S", 1.0)
    for name in ("STACKS_S", "UNKILLABLE_S"):
        monkeypatch.setattr(rank_processes, name, 0.3)
    monkeypatch.setattr(rank_processes, "Popen", Unkillable)
    assert supervised(monkeypatch, "print(os.getpid(), flush=True); time.sleep(600)", 1, watchdog_s=1.0) == 75
    out, said = capfd.readouterr()
    os.kill(int(out), signal.SIGKILL)
    assert f"worker 0 cannot be killed: process {int(out)} waits; the run goes on without it" in said


def in_a_group_of_its_own() -> None:
    """A patch: the run has a process group of its own, as in a shell's foreground."""
    os.setpgid(0, 0)
    silent_soon()


@pytest.mark.parametrize("everything", [False, True], ids=["Ctrl-Z and fg", "the machine is suspended"])
def test_workers_outlive_a_pause_of_their_parent(everything: bool, command: list[str], tmp_path: Path) -> None:
    """The pause is longer than the limit. Workers that were stopped too continue a second after their parent."""
    out, log = tmp_path / "out", tmp_path / "log"
    words = [*command, f"output.dir={out}", "device=cpu", "cluster.workers=2", "cluster.watchdog_s=4"]
    parent = start_apart(words, log, in_a_group_of_its_own)
    wait_until(lambda: len(owners(out)) == 2, parent)
    assert parent.pid is not None
    stopped, pid = workers_of(parent) if everything else [], parent.pid
    os.killpg(pid, signal.SIGTSTP)
    wait_until(lambda: rank_ends.state_of(pid) == "was stopped by a signal", parent)
    for worker in stopped:
        os.kill(worker, signal.SIGSTOP)
    time.sleep(5.5)
    os.killpg(pid, signal.SIGCONT)
    time.sleep(1.0 if stopped else 0.0)
    for worker in stopped:
        os.kill(worker, signal.SIGCONT)
    code, said = ended(parent), log.read_text()
    assert code == 0, said
    assert "killed" not in said
    assert len(tokens(out, ROWS)) == ROWS


def test_only_the_leader_gets_the_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"""
{RANK}
def told(*_):
    open(f'{tmp_path}/told {{rank}}', 'w').close()
    end.send(b"the end")
    sys.exit(75)
signal.signal(signal.SIGTERM, told)
if rank:
    end.send_digest(1, 0)
    end.receive()
    sys.exit(0)
end.digest_of(1, 1)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""
    assert supervised(monkeypatch, program, 2, tensor_parallel=2) == 75
    assert [path.name for path in tmp_path.iterdir()] == ["told 0"]


def test_every_rank_sees_all_gpus_of_its_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"open(f'{tmp_path}/{{number}} {{sys.argv[1]}} ' + os.environ['CUDA_VISIBLE_DEVICES'], 'w').close()"
    monkeypatch.setattr(crew, "PROGRAM", ("-c", "import os, sys; number = int(sys.argv[6]); " + program))
    config = RunConfig()
    config.output.dir, config.cluster.tensor_parallel = "/nowhere", 2
    assert workers.supervise(config, ["3", "4", "6", "7"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 0 3,4", "0 1 3,4", "1 0 6,7", "1 1 6,7"]
