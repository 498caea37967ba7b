"""Compiling side by side, for a card that is not there: what is compiled, what fails, and what is left as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from batchspec.kernels import ahead

ROOT = Path(__file__).parents[2]


@triton.jit
def good_kernel(x, n, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(x + places, tl.load(x + places, mask=places < n, other=0.0) + 1.0, mask=places < n)


@triton.jit
def bad_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), nowhere)  # type: ignore[name-defined]  # noqa: F821


class _Card:
    """As much of Triton's driver as it takes to compile."""

    launchers: ClassVar[list[str]] = []

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(source.name)
        raise OSError("no C compiler")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compiled(kernel: Any) -> list[str]:
    return [type(found).__name__ for found in kernel.device_caches[0][0].values()]


def ask() -> dict[str, Any]:
    """Passes that launch kernels on tensors of a CPU, and what came of them."""
    triton.runtime.driver.set_active(_Card())
    ahead._OWN = __name__.partition(".")[0]
    compiles: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiles.append(cache_hit)
    x, launch = torch.ones(64), JITFunction.run

    def sizes() -> None:
        for size in (16, 32, 64, 16):
            good_kernel[(1,)](x, 20, SIZE=size)

    def fails() -> None:
        good_kernel[(1,)](x, 20, SIZE=128)
        raise ValueError("no such shape")

    def bad() -> None:
        bad_kernel[(1,)](x, SIZE=16)
        good_kernel[(1,)](x, 20, SIZE=256)

    failures = ahead.ask_for([sizes, fails, bad], threads=2)
    found: dict[str, Any] = {"failures": [repr(failure) for failure in failures], "compiles": len(compiles)}
    found |= {"good": _compiled(good_kernel), "bad": _compiled(bad_kernel), "restored": JITFunction.run is launch}
    found["launchers"] = _Card.launchers.copy()
    found["untouched"] = bool((x == 1).all())
    sizes_again = ahead.ask_for([sizes], threads=2)
    found |= {"again": len(compiles) - found["compiles"], "failures again": len(sizes_again)}
    try:
        bad_kernel.run(x, SIZE=16, grid=(1,), warmup=True)
    except triton.CompilationError as error:
        found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process without the interpreter, with an empty cache."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_every_variant_is_compiled_once_and_none_runs(found: dict[str, Any]) -> None:
    assert found["good"] == ["CompiledKernel"] * 5
    assert found["compiles"] == 5
    assert found["launchers"] == ["good_kernel"] * 5
    assert found["again"] == 0
    assert found["untouched"]


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(found: dict[str, Any]) -> None:
    assert found["bad"] == []
    assert "nowhere" in found["error"]


def test_a_pass_that_fails_is_named_and_keeps_no_other_from_compiling(found: dict[str, Any]) -> None:
    assert found["failures"] == ["ValueError('no such shape')"]
    assert found["failures again"] == 0
    assert found["restored"]


def test_nothing_happens_on_a_cpu_or_under_the_interpreter_or_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def asked(passes: Any, threads: int) -> list[Exception]:
        calls.append("asked")
        return []

    monkeypatch.setattr(ahead, "ask_for", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    ahead.compile_ahead([], torch.device("cpu"))
    assert not calls
    ahead.compile_ahead([], torch.device("cuda"))
    assert calls == ["asked"]
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    ahead.compile_ahead([], torch.device("cuda"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    ahead.compile_ahead([], torch.device("cuda"))
    assert calls == ["asked"]


def test_what_could_not_be_asked_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "ask_for", lambda passes, threads: [ValueError("no such shape")] * 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.warns(UserWarning, match=r"3 times ValueError\('no such shape'\)"):
        ahead.compile_ahead([], torch.device("cuda"))


def test_values_that_kernels_would_have_written_are_zero_and_so_are_places(device: torch.device) -> None:
    table = torch.arange(1, 7, device=device).view(3, 2)
    far = torch.full((2,), -1_000_000, device=device)
    with ahead.asking(set()):
        assert not torch.empty(1000, device=device).any()
        assert not table.new_empty(1000).any()
        assert not torch.empty_like(far).any()
        assert table.index_select(0, far).tolist() == [[1, 2], [1, 2]]
        assert table[far, far].tolist() == [1, 1]
        assert table.gather(1, far.view(1, 2)).tolist() == [[1, 1]]
        table[far] = 9
        table.scatter_(1, far.view(1, 2), 8)
    assert table.tolist() == [[8, 9], [3, 4], [5, 6]]


if __name__ == "__main__":
    print(json.dumps(ask()))
