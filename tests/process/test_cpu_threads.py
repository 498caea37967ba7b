"""The number of threads on a CPU that other processes use too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import batchspec
from batchspec.tuning import cpu_threads
from tests.helpers.models import make_checkpoint


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a machine with four CPUs whose user has said nothing; the numbers that are set."""
    made: list[int] = []
    for name in cpu_threads.GIVEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    monkeypatch.setattr(cpu_threads, "cpus_in_use", lambda seconds: 0.3)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: None)
    return made


@pytest.mark.parametrize(
    ("used", "quota", "number"),
    [(0.0, None, 4), (0.4, None, 4), (1.0, None, 3), (17.0, None, 1), (0.0, 2.5, 2), (0.0, 0.5, 1), (3.0, 2.0, 1)],
)
def test_as_many_threads_compute_as_cpus_are_free(
    used: float, quota: float | None, number: int, four_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "cpus_in_use", lambda seconds: used)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    said = cpu_threads.limit_threads()
    assert four_threads == [number] * (number < 4)
    assert said.startswith(f"{number} of 4 threads compute, because ") if number < 4 else said == ""


def test_the_line_says_why_and_what_sets_another_number(four_threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "cpus_in_use", lambda seconds: 2.8)
    said = "1 of 4 threads compute, because other processes use 2.8 CPUs of 4; OMP_NUM_THREADS=4 sets another number"
    assert cpu_threads.limit_threads() == said
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: 1.0)
    assert "because its cgroup has 1.0 CPUs" in cpu_threads.limit_threads()


@pytest.mark.parametrize("name", cpu_threads.GIVEN)
def test_a_number_of_the_user_is_kept(name: str, four_threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "cpus_in_use", lambda seconds: 4.0)
    monkeypatch.setenv(name, "4")
    assert cpu_threads.limit_threads() == ""
    assert not four_threads


@pytest.mark.second
def test_a_busy_process_counts_and_this_one_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            time.sleep(0.2)
            assert cpu_threads.cpus_in_use(0.5) > 0.2
        finally:
            other.kill()
    begin, own = time.monotonic(), time.process_time()
    busy = cpu_threads._busy_s()
    while time.process_time() - own < 0.3:
        pass
    others = cpu_threads._busy_s() - busy - 0.3
    assert others <= (os.cpu_count() or 1) * (time.monotonic() - begin) - 0.2


def test_the_smallest_quota_of_the_cgroups_around_counts(tmp_path: Path) -> None:
    inner = tmp_path / "root/pod/container"
    inner.mkdir(parents=True)
    member = tmp_path / "cgroup"
    member.write_text("0::/pod/container\n")
    assert cpu_threads.cpu_quota(tmp_path / "root", member) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_threads.cpu_quota(tmp_path / "root", member) is None
    (tmp_path / "root/pod/cpu.max").write_text("250000 100000\n")
    assert cpu_threads.cpu_quota(tmp_path / "root", member) == 2.5
    old = tmp_path / "old/cpu"
    old.mkdir(parents=True)
    (old / "cpu.cfs_period_us").write_text("100000")
    for quota, cpus in (("-1", None), ("150000", 1.5)):
        (old / "cpu.cfs_quota_us").write_text(quota)
        assert cpu_threads.cpu_quota(tmp_path / "old", tmp_path / "none") == cpus
    (old / "cpu.cfs_period_us").write_text("0")
    (tmp_path / "old/cpu.max").write_text("0 0")
    assert cpu_threads.cpu_quota(tmp_path / "old", tmp_path / "none") is None


def test_a_run_on_a_cpu_says_it(
    tmp_path: Path, four_threads: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_threads, "cpus_in_use", lambda seconds: 3.0)
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.float64, num_hidden_layers=1)
    keys = {"model.path": str(folder), "decode.max_new_tokens": 2, "draft": "none"}
    batchspec.generate({"prompt_ids": [[5, 6]]}, overrides=keys)
    assert "1 of 4 threads compute, because other processes use 3.0 CPUs of 4" in capsys.readouterr().err
    assert four_threads == [1]
