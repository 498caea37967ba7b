"""A developer's tool: what four-bit weights change of a model. It quantises the model in each format and compares on prompts.

    python -m tests.heads.four_bits smollm2-135m pkg://demo --head pkg://smollm2-135m-eagle3 --rows 16 --tokens 64

For each format a line: bits of a weight in the layers, scales included; KL(model || quantised) of the next token in nats and the
share of greedy tokens that change, along the model's own greedy outputs; and how many tokens a round gives with each drafter,
along the quantised model's outputs. Weights are rounded to the nearest code, without calibration, so published checkpoints are
nearer to their models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from batchspec import run
from batchspec.checkpoint.files import LocalFiles, weight_names
from batchspec.checkpoint.hub import resolve_model
from batchspec.job.report.stats import job_stats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.weights import judge_model
from tests.heads.upcycle import compare, write_model
from tests.helpers.four_bit_models import FOUR_BITS, packed


def bits_of(folder: Path) -> float:
    """Bits of a weight of the layers' products, as a GPU keeps it in memory."""
    spec = judge_model(LocalFiles(folder))
    if any(isinstance(own, Fp8) for own in spec.formats.all):
        spec = spec.with_fp8_activations()
    return 8 * spec.block_bytes(torch.bfloat16) / sum(gemm.stored * gemm.size for _, gemm in spec.gemms(1))


def tokens_a_round(folder: Path, prompts: str, draft: Sequence[str], *, rows: int, tokens: int, chat: bool) -> float:
    """The mean acceptance length of a job, the bonus token counted. draft: its overrides."""
    with tempfile.TemporaryDirectory() as out:
        asked = [
            f"model.path={folder}", "model.dtype=float32", f"input.path={prompts}", f"input.limit={rows}", f"input.chat={chat}",
            f"output.dir={out}/out", f"decode.max_new_tokens={tokens}", *draft,
        ]
        if code := run.main(asked):
            raise SystemExit(code)
        found = job_stats(f"{out}/out").overall.mean_acceptance_length
    return float("nan") if found is None else found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--head", help="folder of an EAGLE-3 head, or pkg://NAME")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the column `prompt`")
    parser.add_argument("--formats", nargs="+", choices=FOUR_BITS, default=list(FOUR_BITS))
    args = parser.parse_args(argv)
    size = {"rows": args.rows, "tokens": args.tokens, "chat": args.chat}
    drafts = {"lookup": ["draft=lookup"]}
    if args.head:
        drafts["head"] = ["draft=eagle3", f"draft.path={args.head}", "draft.num_speculative_tokens=3"]
    source, lines = resolve_model(args.model), list[str]()
    dense = {name: tensor for file in weight_names(LocalFiles(source)) for name, tensor in load_file(source / file).items()}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as made:
        for name in ("", *args.formats):
            folder, told = source, "-"
            if name:
                own = config | {"quantization_config": FOUR_BITS[name].config}
                folder = write_model(source, Path(made) / name, packed(dense, name), own)
                told = str(compare(source, folder, args.prompts, dtype="float32", **size))
            rounds = [f"{tokens_a_round(folder, args.prompts, draft, **size):.2f} with {of}" for of, draft in drafts.items()]
            lines.append(f"{name or 'model'}: {bits_of(folder):.2f} bits, {told}; tokens a round: {', '.join(rounds)}")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
