"""Kernels are compiled before the first request: no pass of prefill and no row that moves in the middle of a run compiles one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCRIPT = """
import random
import sys
import triton
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from tests.engines import make_engine
from tests.engines import packed, request
from tests.test_gpu_experts import BF16, GPU, spec_of

compiled = []

def on_compile(**event):
    compiled.append(event["repr"])

spec = spec_of(sys.argv[1])
target = Target(spec, DummyWeights(spec, dtype=BF16, device=GPU), GPU)
drafter = LookupDrafter(4, min_ngram=1, max_ngram=2) if sys.argv[2] == "lookup" else NoDrafter()
batch = packed(24, num_pages=600, page_size=16, max_len=300, prefill_tokens=1024, row_buckets=(1, 2, 4, 8, 12, 16, 24))
engine = make_engine(target, drafter, batch, device=GPU)
pick = random.Random(0)
prompts = [[pick.randrange(500) for _ in range(pick.randrange(3, 200))] for _ in range(150)]
requests = [request(i, prompt, cap=pick.randrange(3, 90)) for i, prompt in enumerate(prompts)]
triton.knobs.runtime.jit_post_compile_hook = on_compile
engine.prepare(SamplingMode())
ahead = len(compiled)
assert ahead > 0, "nothing was compiled: the hook does not work"
assert len(list(engine.run(iter(requests)))) == len(requests)
print("compiled late:", *compiled[ahead:], sep="\\n")
"""


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@pytest.mark.parametrize("form", ["bf16", "fp8 blocks", "mxfp4"])
def test_nothing_is_compiled_after_an_engine_was_prepared(form: str, drafter: str) -> None:
    """In a process of its own, because an earlier test may have compiled what is missing."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, form, drafter], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "compiled late:\n"
