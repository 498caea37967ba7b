"""Runs jobs over pictures that a trained reader has not seen, and says what it reads.

    python jobs/examples/reader/check_reader.py MODEL --fonts FOLDER [--rows 200] [key=value ...]
    python jobs/examples/reader/check_reader.py --fonts FOLDER --rows 40 --write FILE.parquet

Rows are lines of 10 to 40 characters, as in training but of another seed, half of them in the font that training left out.
Prints the share that is read without a mistake, and whether drafts (lookup, mtp), other slots, a kill with a resumed run and
transformers give the same texts. Exit code 1 if one does not. --write only writes the rows: id, font, text, prompt, image.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import torch
from PIL import Image
from reader_lines import HEIGHTS, MOST, UNSEEN, draw, find_fonts, plan_line
from reader_pictures import pictures

import batchspec

QUESTION = "Read."
KEYS = ("model.dtype=float32", "input.chat=true", "input.columns={images: image}", "decode.max_new_tokens=48")
SEED = 2026


def make_rows(fonts: Path, unseen: str, count: int, seed: int = SEED) -> pl.DataFrame:
    """Rows of pictures with their texts, every second one in the font that training left out."""
    groups, rng = find_fonts(fonts, unseen), Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = list[dict[str, Any]]()
    for number in range(count):
        line = plan_line(rng, groups[number % 2], 10, MOST)
        found = draw(rng, [line], rng.choice(HEIGHTS), line.canvas_width)
        (picture,) = pictures(torch.from_numpy(found.masks), torch.from_numpy(found.room), 1.0, generator)
        out = io.BytesIO()
        Image.fromarray(picture.numpy()).save(out, "JPEG", quality=92, subsampling=0)
        font = "unseen" if number % 2 else "seen"
        values = {"font": font, "text": line.text, "prompt": QUESTION, "image": out.getvalue()}
        rows.append({"id": f"line-{number:03d}", **values})
    return pl.DataFrame(rows)


def exact(answers: pl.DataFrame) -> dict[str, float]:
    """The share of rows without a mistake, by `font`."""
    right = answers.select("font", right=pl.col("completion").fill_null("") == pl.col("text"))
    return {font: float(share) for font, share in sorted(right.group_by("font").agg(pl.col("right").mean()).rows())}


class Jobs:
    """Jobs over the same rows, each with an output of its own."""

    def __init__(self, model: str, rows: pl.DataFrame, folder: Path, keys: Sequence[str]) -> None:
        rows.write_parquet(folder / "in.parquet")
        self._folder, self._keys = folder, [f"model.path={model}", f"input.path={folder}/in.parquet", *KEYS, *keys]
        self._environment = {**os.environ, "PYTHONPATH": str(Path(batchspec.__file__).parents[1])}

    def _start(self, name: str, keys: Sequence[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "batchspec.run", *self._keys, *keys, f"output.dir={self._folder}/{name}"]
        return subprocess.Popen(command, env=self._environment, stderr=subprocess.PIPE, text=True)

    def run(self, name: str, *keys: str) -> pl.DataFrame:
        """The output in the order of rows. Raises RuntimeError with what a failed run said."""
        process = self._start(name, keys)
        said = process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"the job {name} ended with {process.returncode}: {said}")
        return pl.read_parquet(self._folder / name / "data").sort("row_index")

    def killed(self, name: str, *keys: str) -> pl.DataFrame:
        """The same of a run that is killed after its first shard, and of one that resumes it."""
        process = self._start(name, keys)
        data = self._folder / name / "data"
        while process.poll() is None and not (data.is_dir() and any(data.iterdir())):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the job {name} ended before it was killed; give it more --rows")
        return self.run(name, *keys)


def by_transformers(model: str, rows: pl.DataFrame) -> list[str]:
    """Texts that transformers' greedy decoding gives."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

    auto: Any = AutoModelForImageTextToText
    network = auto.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(model)
    pad, merged = network.config.image_token_id, network.config.vision_config.spatial_merge_size**2
    found = list[str]()
    for row in rows.iter_rows(named=True):
        inputs = processor([Image.open(io.BytesIO(row["image"]))], return_tensors="pt")
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        at, count = ids.index(pad), int(inputs["image_grid_thw"].prod()) // merged
        tokens = torch.tensor([[*ids[:at], *[pad] * count, *ids[at + 1 :]]])
        kinds = (tokens == pad).int()
        out = network.generate(input_ids=tokens, mm_token_type_ids=kinds, **inputs, max_new_tokens=48, do_sample=False)
        found.append(tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


def check(model: str, rows: pl.DataFrame, folder: Path, keys: Sequence[str], transformers_rows: int) -> dict[str, float] | None:
    """Prints all results. Returns the shares of `exact`, None if a job gives other texts than the first one."""
    jobs = Jobs(model, rows, folder, keys)
    first = jobs.run("none", "draft=none")
    texts, shares = first["completion"].to_list(), exact(first)
    print(f"{len(rows)} lines read without a mistake: " + ", ".join(f"{font} font {one:.1%}" for font, one in shares.items()))
    others: dict[str, Callable[[], pl.DataFrame]] = {
        "draft=lookup": lambda: jobs.run("lookup", "draft=lookup"),
        "draft=mtp": lambda: jobs.run("mtp", "draft=mtp"),
        "3 slots": lambda: jobs.run("slots", "draft=none", "packing.max_num_seqs=3"),
        "a kill and a resumed run": lambda: jobs.killed("killed", "draft=mtp", "output.shard_rows=8", "packing.max_num_seqs=4"),
    }
    differ = 0
    for name, run in others.items():
        own = run()
        count = sum(one != other for one, other in zip(own["completion"].to_list(), texts, strict=True))
        differ += count
        print(f"{name}: {count or 'no'} other texts" + _acceptance(own))
    if transformers_rows:
        theirs = by_transformers(model, rows.head(transformers_rows))
        count = sum(one != other for one, other in zip(theirs, texts, strict=False))
        differ += count
        print(f"transformers, {len(theirs)} rows: {count or 'no'} other texts")
    return None if differ else shares


def _acceptance(answers: pl.DataFrame) -> str:
    drafted = answers.filter(pl.col("spec_decode").is_not_null())["spec_decode"].struct.unnest()
    if not drafted.height:
        return ""
    accepted, rounds = (int(drafted[name].sum()) for name in ("num_accepted_draft_tokens", "num_spec_steps"))
    return f", mean acceptance length {1 + accepted / rounds:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the folder of a trained reader")
    parser.add_argument("keys", nargs="*", help="keys of the jobs, such as device=cpu")
    parser.add_argument("--fonts", type=Path, required=True, help="a folder of .ttf and .otf files")
    parser.add_argument("--unseen", default=UNSEEN, help="the font that training left out; default: %(default)s")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--transformers", type=int, default=20, help="rows that transformers reads too; default: %(default)s")
    parser.add_argument("--write", type=Path, help="write the rows to this file, and stop")
    given = parser.parse_intermixed_args(arguments)  # keys may follow options
    rows = make_rows(given.fonts, given.unseen, given.rows)
    if given.write is not None:
        rows.write_parquet(given.write)
        return 0
    if given.model is None:
        parser.error("MODEL is missing: the folder that train_reader.py wrote")
    with tempfile.TemporaryDirectory(prefix="reader-") as folder:
        return 0 if check(given.model, rows, Path(folder), given.keys, given.transformers) else 1


if __name__ == "__main__":
    sys.exit(main())
