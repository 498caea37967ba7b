"""A recording for refactoring: what the scheduler decides, which kernels are launched, and the tokens of some tiny jobs.

    python -m tests.recording OUT.jsonl     writes a line of JSON for each job of `helpers/recorded_jobs.py`
    python -m tests.recording compare REV   records REV in a worktree of its own, and these files; exits with 1 if a job differs

A commit that changes no behaviour changes no byte. On a CPU the engine calls the torch reference of each kernel. The kernel's
wrapper is called a second time, with `interpret`, only to learn what it would launch: nothing is executed. Products that a CPU
leaves to torch, and attention by other libraries, are not recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from hashlib import blake2b
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from pkgutil import walk_packages
from shutil import copyfile
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if __name__ == "__main__":  # read when torch and triton are imported
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}

from triton.runtime.interpreter import InterpretedFunction

from batchspec import kernels
from batchspec.engine.slots import expected_pages

if TYPE_CHECKING:
    from batchspec.engine.loop.engine import Engine
    from batchspec.engine.step import ScheduledStep
    from batchspec.records import Completion
    from tests.helpers.recorded_jobs import Job

ROOT = Path(__file__).parents[1]
FILES = ("tests/recording.py", "tests/helpers/recorded_jobs.py")
"""Copied to a commit that has none."""
UNUSED = (".benchmarks", ".train", ".distributed")
"""Packages of kernels that a tiny job never calls."""
Record = dict[str, Any]


def digest(what: object) -> str:
    return blake2b(repr(what).encode(), digest_size=8).hexdigest()


@cache
def wrappers() -> dict[Any, str]:
    """The functions that launch kernels: those with an argument `interpret`."""
    found = {}
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if not any(part in module.name for part in UNUSED):
            for value in vars(import_module(module.name)).values():
                if isfunction(value) and value.__module__ == module.name and "interpret" in signature(value).parameters:
                    found[value] = value.__name__
    return found


class Launches:
    """What kernels' wrappers launch, since `take`, while `recorded` is entered."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self._probing = False

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return made

    def _launched(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        sizes = grid({**dict(zip(kernel.arg_names, args, strict=False)), **options}) if callable(grid) else grid
        self.made.append(f"{kernel.fn.__name__}{tuple(int(size) for size in sizes)}")

    def _told(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wrapper)
        def call(*args: Any, **options: Any) -> Any:
            if not self._probing:
                self._probing = True
                try:
                    with patch.object(InterpretedFunction, "run", lambda *given, **more: self._launched(*given, **more)):
                        wrapper(*args, **{**options, "interpret": True})
                except (ValueError, TypeError, AssertionError) as error:  # a kernel that lacks float64: its reference runs
                    self.made.append(f"{wrapper.__name__}: {type(error).__name__}")
                finally:
                    self._probing = False
            return wrapper(*args, **options)

        return call

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Replace the wrappers in every module that names them."""
        told = {wrapper: self._told(wrapper) for wrapper in wrappers()}
        back: list[tuple[Any, str, Any]] = []
        for name, module in list(sys.modules.items()):
            if name.startswith("batchspec"):
                back += [(module, key, value) for key, value in vars(module).items() if isfunction(value) and value in told]
        for module, key, value in back:
            setattr(module, key, told[value])
        try:
            yield
        finally:
            for module, key, value in back:
                setattr(module, key, value)


def step_record(step: ScheduledStep, engine: Engine, launches: list[str]) -> Record:
    """Counts of what a step does, and digests of what they do not say."""
    passes = () if step.prefill is None else step.prefill.passes
    done, shape = step.round, None if step.round is None else step.round.shape
    pages = [(refill.slot, refill.pages, refill.num_cached) for refill in step.refills]
    grants = [(grant.slot, grant.first_column, grant.pages) for grant in step.grants]
    given = [columns for *_, added in grants for columns in added] + [columns for _, added, _ in pages for columns in added]
    return {
        "kind": "+".join(kind for kind, is_there in (("prefill", passes), ("round", done)) if is_there) or "other",
        "segments": [len(one) for one in passes],
        "tokens": sum(segment.end - segment.begin for one in passes for segment in one),
        "rows": shape and shape.num_rows, "K": shape and shape.draft_len, "mean_len": shape and shape.mean_len,
        "refills": len(step.refills), "live": engine.slots.num_live, "held": len(engine.slots.held),
        "resumed": len(step.resumed), "killed": len(step.killed), "moved": len(step.moves),
        "cached": sum(refill.num_cached for refill in step.refills),
        "pages": sum(map(len, given)), "reads": step.num_reads, "launches": len(launches),
        "details": digest((passes, pages, grants, step.killed, step.moves, step.resumed, shape, done and done.new_prefix_groups)),
        "of_launches": digest(launches),
    }


def row_record(done: Completion) -> Record:
    ids = None if done.token_ids is None else done.token_ids.tolist()
    numbers = [done.logprobs, done.top_logprobs, done.prompt_logprobs, done.prompt_top_logprobs]
    values = digest([one if one is None else [part.tolist() for part in one] for one in numbers])
    error = None if done.error is None else done.error.message
    return {"id": done.request_id, "tokens": ids, "reason": done.finish_reason, "logprobs": values, "error": error}


def record(name: str, job: Job) -> Record:
    """Everything that a run of the job did."""
    launches, steps = Launches(), list[Record]()
    with launches.recorded(), patch.object(expected_pages, "SHORT_CAP_TOKENS", job.short_cap):
        engine = job.engine()
        execute = engine.executor.execute

        def recorded(step: ScheduledStep) -> None:
            execute(step)
            steps.append(step_record(step, engine, launches.take()))

        with patch.object(engine.executor, "execute", recorded):
            done = [row_record(one) for one in engine.run(iter(job.rows()))]
    return {"job": name, "steps": steps, "rows": done}


def difference(before: Record, after: Record) -> str | None:
    """The first step or row that is not the same, in one line; None: there is none."""
    for part in ("steps", "rows"):
        for number, (old, new) in enumerate(zip(before[part], after[part], strict=False)):
            if changed := [f"{key} {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]:
                return f"{part[:-1]} {number} ({old.get('kind', old.get('id'))}): {', '.join(changed)}"
        if len(before[part]) != len(after[part]):
            return f"{len(before[part])} -> {len(after[part])} {part}"
    return None


def report(before: Iterable[Record], after: Iterable[Record]) -> tuple[list[str], bool]:
    """A line for each job, and whether all are the same."""
    old, new = ({record["job"]: record for record in records} for records in (before, after))
    differences: dict[str, str | None] = {}
    for name in {**old, **new}:
        missing = "only before" if name not in new else "only after" if name not in old else None
        differences[name] = missing or difference(old[name], new[name])
    return [f"{name}: {what or 'same'}" for name, what in differences.items()], not any(differences.values())


def start(root: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.recording", str(out)]
    return subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})


def compare(rev: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree, outs = Path(folder, "tree"), [Path(folder, "before"), Path(folder, "after")]
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), rev], cwd=ROOT, check=True)
        try:
            for name in FILES:
                if not (tree / name).exists():
                    copyfile(ROOT / name, tree / name)
            running = [start(root, out) for root, out in zip((tree, ROOT), outs, strict=True)]
            if [process for process in running if process.wait()]:
                print("a recording failed: see above")
                return 2
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        lines, same = report(*([json.loads(line) for line in out.read_text().splitlines()] for out in outs))
    print("\n".join(lines))
    return 0 if same else 1


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "compare":
        return compare(arguments[1])
    if len(arguments) != 1:
        print(__doc__)
        return 2
    from tests.helpers.recorded_jobs import JOBS

    with Path(arguments[0]).open("w", encoding="utf-8") as out:
        for name, job in JOBS.items():
            out.write(json.dumps(record(name, job)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
