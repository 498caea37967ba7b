"""The output folder of a large job of short rows whose run was killed, to measure what the commands and the next run take.

    python -m tests.killed_job FOLDER [ROWS] [SHARE]     default: 1,000,000 rows, 0.9 of the shards committed

Everything but the rounds is real, as in `tests/job_layer.py`; here the tokenizer is a real one too, so that a command of its own
can go on with the job: FOLDER/command says which. Its model is a tiny one with random weights.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.config.compose import compose
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.prepare import open_job
from batchspec.job.run_job import decode_missing
from batchspec.job.runner.job_run import open_run
from batchspec.process.signals import EndSignals
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.job_layer import POOL, StandInEngine, some_texts

TOKENS, CHARS = 16, 60
"""Tokens of an answer; characters of a prompt, and of an answer."""
GROUP_ROWS = 50_000


def main(folder: Path, num_rows: int, share: float) -> None:
    """Kills this process once this share of the shards is committed."""
    make_tokenizer(make_checkpoint(folder / "model", "llama", num_hidden_layers=1))
    texts = [text[:CHARS] for text in some_texts()]
    _write_input(folder / "input.parquet", num_rows, texts)
    words = [
        f"model.path={folder}/model", "model.load_format=dummy", f"input.path={folder}/input.parquet", f"output.dir={folder}/out",
        f"decode.max_new_tokens={TOKENS}", "draft=none", "device=cpu",
    ]
    (folder / "command").write_text(shlex.join(["python", "-m", "batchspec.run", *words]) + "\n", encoding="utf-8")
    job = open_job(compose(words))
    _killed_after(int(share * job.layout.num_shards))
    with EndSignals() as signals:
        decode_missing(open_run(job), signals, load=StandInEngine(texts, TOKENS).loaded)


def _write_input(path: Path, num_rows: int, texts: list[str]) -> None:
    """Rows of about 40 tokens that all differ; every 500th has no prompt."""
    kinds = pa.schema({"id": pa.string(), "prompt": pa.string(), "kind": pa.string()})
    with pq.ParquetWriter(path, kinds, compression="zstd") as writer:
        for first in range(0, num_rows, GROUP_ROWS):
            rows = range(first, min(first + GROUP_ROWS, num_rows))
            prompts = [f"{row} {texts[row % POOL]}" if row % 500 != 7 else None for row in rows]
            named = [f"row-{row:08d}" for row in rows]
            writer.write_table(pa.table({"id": named, "prompt": prompts, "kind": [str(row % 7) for row in rows]}, schema=kinds))


def _killed_after(count: int) -> None:
    publish, published = OutputFolder.publish, 0

    def counted(self: OutputFolder, *rest: Any) -> bool:
        nonlocal published
        won, published = publish(self, *rest), published + 1
        if published >= count:
            os.kill(os.getpid(), signal.SIGKILL)
        return won

    OutputFolder.publish = counted  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 1_000_000, float(sys.argv[3]) if sys.argv[3:] else 0.9)
