"""A developer's tool: makes a small Qwen3.5 that writes English, with an MTP layer, and checks batchspec on its text.

    python -m tests.heads.english_recurrent make OUT gsm8k_train.parquet --minutes 3
    python -m tests.heads.english_recurrent check OUT gsm8k_test.parquet

`make` needs a few minutes of a GPU:

OUT/answers   SmolLM2-135M's own answers to the questions, sampled
OUT/model     SmolLM2 with gated delta rule layers instead of two of three attention layers, distilled from it on
              these answers (`tests.heads.recurrent_conversion`, `tests.heads.recurrent_distillation`), and its MTP layer
OUT/greedy    its own greedy answers, from which the MTP layer learns
OUT/mtp       that layer alone, by `batchspec train draft=mtp`

`check` runs whole jobs and compares them (`tests.heads.english_checks`). Both go on after an error of one step, print it, and end
with a table; what they found is in OUT/made.json and OUT/checked.json. A step whose result is there is not done again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles, weight_names
from batchspec.checkpoint.hub import resolve_model
from tests.heads.english_checks import Checks
from tests.heads.recurrent_conversion import converted, measured, recurrent_config
from tests.heads.recurrent_distillation import Distillation, Plan, padded, read_texts
from tests.heads.upcycle import write_model

ROOT = Path(__file__).parents[2]
SOURCE = "smollm2-135m"
CALIBRATED = 24
"""Number of texts over which `measured` goes."""


class Steps:
    """Runs steps one after another; what one returns, or its error, goes into a file and a table."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def __call__(self, name: str, step: Callable[[], dict[str, Any]]) -> None:
        if "error" not in self.found.get(name, {"error": None}):
            print(f"== {name}: done before", flush=True)
            return
        print(f"== {name}", flush=True)
        begun = time.monotonic()
        try:
            self.found[name] = step()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()  # the next step may run in a process of its own, which needs the memory of the GPU
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.found[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(f"== {name}: {self.found[name]['seconds']} s", flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.found, indent=1))

    def table(self) -> None:
        print("\n| step | seconds | found |\n|---|---|---|")
        for name, found in self.found.items():
            short = {key: value for key, value in found.items() if key not in ("seconds", "curve", "details")}
            print(f"| {name} | {found['seconds']} | {', '.join(f'{key} {value}' for key, value in short.items())} |")

    @property
    def failed(self) -> bool:
        return any("error" in found for found in self.found.values())


def command(log: Path, *words: str, timeout_s: float = 400) -> None:
    """Run a command of batchspec in a process of its own, its output to a file. Raises RuntimeError with its last lines."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-m", *words], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=file, stderr=file,
            timeout=timeout_s, check=False,
        )
    said = log.read_text(errors="replace").strip().splitlines()
    print("\n".join(f"   {line[:200]}" for line in said if "tok/s" in line or "held-out" in line), flush=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]} ended with {done.returncode}: {' | '.join(said[-3:])[:400]}")


class Making:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._out = args, Path(args.out)
        self._model = self._out / "model"

    def steps(self, run: Steps) -> None:
        run("answers", self._answers)
        run("distillation", self._distilled)
        run("greedy", self._greedy)
        run("mtp", self._mtp)

    def _job(self, name: str, model: str, *words: str) -> dict[str, Any]:
        shutil.rmtree(self._out / name, ignore_errors=True)
        command(
            self._out / "logs" / f"{name}.log", "batchspec.run", f"model.path={model}", "draft=none", "output=training",
            f"input.path={self._args.prompts}", "input.chat=true", f"output.dir={self._out / name}",
            f"input.limit={self._args.rows or 'null'}", f"packing.max_num_seqs={self._args.slots}",
            f"decode.max_new_tokens={self._args.tokens}", *words,
        )
        found = pl.read_parquet(self._out / name / "data" / "*.parquet")
        lengths = found["token_ids"].list.len()
        counts = dict(found["status"].value_counts().sort("status").iter_rows())
        print("   " + str(found["messages"][0][-1]["content"])[:300].replace("\n", "\n   "), flush=True)
        return {"rows": len(found), "tokens": int(lengths.sum()), "status": counts}

    def _answers(self) -> dict[str, Any]:
        return self._job("answers", self._args.source, f"decode.n={self._args.samples}", "decode.temperature=0.8")

    def _distilled(self) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        auto: Any = AutoModelForCausalLM
        source = resolve_model(self._args.source)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        teacher = auto.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        plan = Plan(seconds=60 * self._args.minutes, tokens=self._args.batch_tokens, held_out=self._args.held_out)
        trained, held_out = read_texts(self._out / "answers", plan.max_len)
        config = recurrent_config(json.loads((source / "config.json").read_text()), self._args.every)
        dense = {name: tensor for file in weight_names(LocalFiles(source)) for name, tensor in load_file(source / file).items()}
        tensors = converted(dense, config, measured(teacher, *padded(trained[:CALIBRATED], device)))
        begun = self._out / "begun"
        shutil.rmtree(begun, ignore_errors=True)
        write_model(source, begun, tensors, config)
        student = auto.from_pretrained(begun, dtype=torch.float32, attn_implementation="sdpa").to(device)
        print(f"   {student.num_parameters():,} weights, {len(trained):,} texts, {len(held_out):,} held out", flush=True)
        found = Distillation(teacher, student, plan, trained, held_out).run()
        own = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in student.state_dict().items()}
        if config["tie_word_embeddings"]:
            own.pop("lm_head.weight")
        shutil.rmtree(self._model, ignore_errors=True)
        write_model(source, self._model, own, config)
        shutil.rmtree(begun)
        return found

    def _greedy(self) -> dict[str, Any]:
        return self._job("greedy", str(self._model))

    def _mtp(self) -> dict[str, Any]:
        folder, weights = self._out / "mtp", self._model / "model.safetensors"
        shutil.rmtree(folder, ignore_errors=True)
        command(
            self._out / "logs" / "mtp.log", "batchspec.cli", "train", "draft=mtp", f"model.path={self._model}",
            f"input.path={self._out / 'greedy'}", f"output.dir={folder}", f"train.steps={self._args.mtp_steps}", "train.ahead=4",
            f"train.batch_tokens={self._args.mtp_tokens}", f"train.held_out={self._args.held_out}", "train.eval_steps=0",
            "train.max_len=512",
        )
        save_file(load_file(weights) | load_file(folder / "model.safetensors"), weights, {"format": "pt"})
        last = json.loads((folder / "training.json").read_text())["acceptance"][-1]
        return {"steps": self._args.mtp_steps, "mean_length": last["mean_length"], "by_position": last["by_position"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, checking = commands.add_parser("make"), commands.add_parser("check")
    for one in (making, checking):
        one.add_argument("out", type=Path)
        one.add_argument("prompts", help="Parquet with a column `prompt`")
        one.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    for name, usual, what in (
        ("minutes", 3.0, "of distillation"), ("rows", 0, "questions; 0: all"), ("samples", 2, "answers to a question"),
        ("slots", 1024, "of the jobs"), ("batch-tokens", 16_384, "of distillation"), ("held-out", 192, "texts"),
        ("every", 3, "which layer attends: each third"), ("mtp-steps", 400, "batches of the MTP layer"),
        ("mtp-tokens", 16_384, "of such a batch"),
    ):
        making.add_argument(f"--{name}", type=type(usual), default=usual, help=what)
    making.add_argument("--source", default=SOURCE, help="a Llama for chats")
    for name, count, what in (
        ("rows", 512, "questions of the jobs that are compared"), ("slots", 256, "of the first job, and of the speeds"),
        ("measured", 200, "questions over which acceptance is counted"), ("measured-tokens", 128, "of each of these answers"),
        ("generated", 4, "questions that transformers' generate answers too"), ("timed", 1024, "questions of the speeds"),
        ("runs", 3, "of each speed"),
    ):
        checking.add_argument(f"--{name}", type=int, default=count, help=what)
    checking.add_argument("--steps", nargs="+", default=list(Checks.STEPS), choices=Checks.STEPS)
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    steps = Steps(args.out / ("made.json" if args.command == "make" else "checked.json"))
    if args.command == "make":
        Making(args).steps(steps)
    else:
        Checks(args, command).steps(steps)
    steps.table()
    return int(steps.failed)


if __name__ == "__main__":
    raise SystemExit(main())
