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
from dataclasses import replace
import triton
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop import round_planner
from batchspec.model.spec import read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from tests.helpers.engines import make_engine
from tests.helpers.engines import packed, request
from tests.gpu.test_gpu_experts import BF16, GPU, spec_of

RECURRENT = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "dtype": "bfloat16",
}
CONVS = {
    "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"],
    "vocab_size": 1024, "max_position_embeddings": 4096, "dtype": "bfloat16",
}
MAMBA = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_size": 256, "num_hidden_layers": 5,
    "hybrid_override_pattern": "ME*-M", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "intermediate_size": 512,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128,
    "vocab_size": 1024, "max_position_embeddings": 4096, "dtype": "bfloat16",
}
LATENTS = {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 128, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "vocab_size": 1024, "max_position_embeddings": 4096, "dtype": "bfloat16",
}
FALCON = {
    "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "mamba_d_ssm": 512,
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "ssm_multipliers": [0.5, 0.25, 0.5, 0.5, 0.75],
    "mlp_multipliers": [0.9, 0.6], "vocab_size": 1024, "max_position_embeddings": 4096, "dtype": "bfloat16",
}
KINDS = {"recurrent": RECURRENT, "convolutions": CONVS, "mamba2": MAMBA, "latents": LATENTS, "parallel": FALCON}
compiled, compile_kernels = [], round_planner.compile_kernels
round_planner.compile_kernels = lambda *given: compile_kernels(*given) and False  # as if they were not on disk

def on_compile(**event):
    compiled.append(event["repr"])

form = sys.argv[1]
spec = read_spec(KINDS[form], form).on(GPU, BF16) if form in KINDS else spec_of(form)
target = Target(spec, DummyWeights(spec, dtype=BF16, device=GPU), GPU)
match sys.argv[2]:
    case "lookup":
        drafter = LookupDrafter(4, min_ngram=1, max_ngram=2)
    case "mtp":
        shape = MtpShape.of(spec, replace(spec.mtp, formats=spec.formats))
        drafter = MtpDrafter(dummy_mtp(shape, dtype=BF16, device=GPU), target, 3, slots=24)
    case _:
        drafter = NoDrafter()
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


@pytest.mark.parametrize(
    ("form", "drafter"),
    [*((form, drafter) for form in ("bf16", "fp8 blocks", "mxfp4") for drafter in ("none", "lookup")),
     ("recurrent", "none"), ("recurrent", "mtp"), ("convolutions", "none"), ("convolutions", "lookup"),
     *((form, drafter) for form in ("mamba2", "parallel", "latents") for drafter in ("none", "lookup"))],
)
def test_nothing_is_compiled_after_an_engine_was_prepared(form: str, drafter: str) -> None:
    """In a process of its own, because an earlier test may have compiled what is missing."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, form, drafter], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "compiled late:\n"
