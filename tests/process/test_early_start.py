"""What begins before the imports of a job on a GPU are over, and what imports must not come back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from triton.runtime import cache

from batchspec.kernels.common.compiler_hash import compiler_hash
from batchspec.process import early_start
from tests.helpers.runs import make_model, make_prompts


@pytest.mark.parametrize(
    ("nodes", "visible", "one"),
    [
        (0, None, False),
        (0, "0", False),
        (1, None, True),
        (8, None, False),
        (8, "3", True),
        (8, "GPU-1f,", True),
        (8, "2,3", False),
        (8, "", False),
    ],
)
def test_a_process_of_one_gpu_is_told_by_device_files_and_by_what_is_visible(
    nodes: int, visible: str | None, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_start, "num_nodes", lambda: nodes)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert early_start.one_gpu() == one


def test_work_begins_once_and_its_failure_is_left_to_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began = []
    over = threading.Event()

    def work() -> None:
        began.append(threading.current_thread())
        over.set()
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(early_start, "num_nodes", lambda: 1)
    monkeypatch.setattr(early_start, "_begun", set())
    monkeypatch.setattr(early_start, "_make_context", work)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    for _ in range(3):
        early_start.begin_context()
    assert over.wait(10)
    began[0].join(10)
    assert len(began) == 1
    assert began[0] is not threading.current_thread()


def test_nothing_begins_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "num_nodes", lambda: 0)
    monkeypatch.setattr(early_start, "_begun", set())
    early_start.begin_context()
    early_start.begin_compiler_hash()
    assert not early_start._begun


def test_the_checksum_of_the_compiler_is_the_one_that_triton_names_kernels_by() -> None:
    """It is computed once a process: who asks again does not read the compiler again."""
    assert compiler_hash() == cache.triton_key()
    assert cache.triton_key.cache_info().currsize == 1


NOT_NEEDED = (
    "transformers", "flashinfer", "matplotlib", "huggingface_hub", "datasets", "llguidance", "lark", "torch._dynamo",
    "torch._inductor", "sympy", "scipy", "pandas", "requests", "aiohttp", "fsspec", "boto3", "botocore", "google", "azure", "ray",
    "jsonschema", "IPython", "pytest",
)
"""What few jobs or commands need, and what packages that are needed could import some day."""


@pytest.mark.second
def test_a_run_imports_nothing_that_few_jobs_need() -> None:
    """Each would cost every job's start-up a tenth of a second to several seconds. What torch imports by itself is its own."""
    code = (
        "import sys, torch; own = set(sys.modules); "
        "import batchspec.run, batchspec.config.compose, batchspec.cluster.workers, batchspec.cluster.devices; "
        "import batchspec.job.run_job; "
        f"print(*[name for name in {NOT_NEEDED} if name in sys.modules and name not in own])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.second
def test_a_run_leaves_tables_and_with_them_pandas_to_its_workers(tmp_path: Path) -> None:
    """Arrow imports pandas, if it is installed, to make an array of Python's values and for its datasets: a sixth of a second."""
    folder, said = tmp_path / "installed", tmp_path / "imported"
    folder.mkdir()
    (folder / "pandas.py").write_text(
        f"import os\nwith open({str(said)!r}, 'a') as file:\n    print(os.getpid(), file=file)\nraise ImportError('a test')\n"
    )
    words = [
        f"model.path={make_model(tmp_path / 'model')}", f"input.path={make_prompts(tmp_path / 'in.parquet', 4)}",
        f"output.dir={tmp_path}/out", "decode.max_new_tokens=2", "input.num_workers=1", "draft=none", "device=cpu",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "batchspec.run", *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
    ) as job:
        _, printed = job.communicate()
    assert job.returncode == 0, printed
    assert said.read_text().split(), "the worker made a table"
    assert str(job.pid) not in said.read_text().split()
