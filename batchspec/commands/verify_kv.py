"""`batchspec verify OUT --kv`: what an fp8 K/V cache changes on a job's own prompts.

Rows are decoded again with the other cache than the job's. Then both caches read the same tokens, prompt and written output
(teacher-forced), in one pass a row: KL(p || q) over the vocabulary at every output position, with p of a cache in the model's
data type and q of the fp8 cache, before temperature and penalties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchspec.commands.decode_again import Difference, decode_again, job_of, load_plain, summary, written_tokens
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from batchspec.job.runner.kv_scales import saved_scales
from batchspec.model.dtype import dtype_name
from batchspec.model.kv_calibration import give_scales
from batchspec.model.single_row import forward_row
from batchspec.model.target import Target

POSITIONS = 256
"""Number of positions whose logits are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVComparison:
    """The job's tokens against those of the other cache."""

    written_with: str
    decoded_with: str
    replaced_scales: bool
    """Whether the fp8 cache has calibrated scales because those of the checkpoint cannot be used."""
    num_rows: int
    differences: tuple[Difference, ...]
    num_positions: int
    mean_kl: float
    """Nats per position."""
    largest_kl: float

    def lines(self) -> list[str]:
        """For people."""
        replaced = (
            "the fp8 scales are calibrated: those of the checkpoint cannot be used, so a job in fp8 needs cache.scales=calibrate"
        )
        return [
            *([replaced] if self.replaced_scales else []),
            f"{self.num_rows} completions, written with K and V in {self.written_with}, decoded again with {self.decoded_with}: "
            f"{summary(self.differences, self.num_rows)}",
            f"KL divergence of the next token, fp8 from the model's data type, over {self.num_positions:,} output positions: "
            f"mean {self.mean_kl:.3g} nats, largest {self.largest_kl:.3g}",
        ]


def compare_kv(out: str | Path, num_rows: int, *, dtype: str | None = None, device: str | None = None) -> KVComparison:
    """See the module's docstring. Raises OutputError without a job or token_ids, and if there is no output token to compare.

    dtype, device  for the second decoding; None: those of the job
    """
    job, written = job_of(out, dtype, device, other_kv=True), written_tokens(out, num_rows)
    if job.spec.vision is not None:  # `divergence` computes tokens alone
        why = "verify --kv is not supported for jobs that read images; verify without it compares their tokens"
        raise OutputError(f"{out}: {why}")
    loaded = load_plain(job)
    target, model_dtype = loaded.engine.target, dtype_name(job.dtype)
    if target.kv_scales is None and replace(job.spec, fp8_kv=True).has_kv_scales:
        weights = None if job.config.model.load_format == "dummy" else job.folder
        output = OutputFolder(out)
        give_scales(target, saved_scales(output, job.spec), output.manifest.config["cache"]["scales"], weights, job.tokenizer)
    differences: list[Difference] = []
    divergences: list[float] = []
    num_rows = 0
    for again in decode_again(loaded, written):
        request, num_rows = again.request, num_rows + 1
        differences += [] if again.difference is None else [again.difference]
        tokens, _ = written[request.row_index, request.sample_index]
        divergences += divergence(target, request.prompt_ids.tolist(), tokens, adapter=request.adapter)
    if not divergences:
        raise OutputError(f"{out}: the rows have no output tokens to compare; choose others with --rows")
    names = (model_dtype, "fp8") if job.spec.fp8_kv else ("fp8", model_dtype)
    replaced = job.spec.fp8_kv and job.config.cache.scales == "calibrate"  # see `other_cache`
    return KVComparison(
        written_with=names[0], decoded_with=names[1], replaced_scales=replaced, num_rows=num_rows,
        differences=tuple(differences), num_positions=len(divergences), mean_kl=sum(divergences) / len(divergences),
        largest_kl=max(divergences),
    )


@torch.inference_mode()
def divergence(target: Target, prompt: list[int], output: list[int], *, adapter: int = 0) -> Iterator[float]:
    """KL(p || q) at each output position."""
    ids = [*prompt, *output][:-1]
    if not output:
        return
    hidden = [forward_row(target, ids, fp8=fp8, adapter=adapter)[0][len(prompt) - 1 :] for fp8 in (False, True)]
    for at in range(0, len(output), POSITIONS):
        p, q = (target.logits(part[at : at + POSITIONS]).double().log_softmax(-1) for part in hidden)
        yield from (p.exp() * (p - q)).sum(-1).clamp(min=0.0).tolist()
