"""How much the tests protect the engine's core: one-line mutants of it, and whether a fixed list of test files fails with each.

    python -m tests.mutants TREE [--files PATTERN ...] [--pytest ARGUMENTS] [--count 30] [--seed 1] [--first 0]

TREE is a checkout of its own (`git worktree add TREE COMMIT`): a mutant changes one of its files, which is put back after the
tests. The same seed draws the same mutants of the same commit. One line a mutant: killed or survived, what was changed, and the
test that failed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = tuple(f"batchspec/engine/{room}/*.py" for room in ("loop", "slots", "rounds"))
TESTS = (
    "test_allocator", "test_round_planner", "test_lockstep", "test_groups", "test_kv_groups", "test_refill_policy",
    "test_prefill_graphs", "test_deadline", "test_scoring", "test_repetition", "test_bad_words", "test_no_repeat_ngram",
    "test_lazy", "test_engine_run", "test_tree", "test_replay", "test_lossless", "test_slots", "test_run_times",
    "test_cutoff_of_ranks", "test_vocabulary", "test_adaptive", "test_ablation", "test_recurrent_rows", "test_layers_lossless",
    "test_row_lengths",
)
"""In any folder of tests/. The run stops at the first failure."""
LIMIT_S = 1500
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.And: "or",
    ast.Or: "and",
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """Characters `begin` to `end` of a file are replaced."""

    path: Path
    line: int
    begin: int
    end: int
    text: str

    def source(self, before: str) -> str:
        return before[: self.begin] + self.text + before[self.end :]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a file that are tried, one at a time: another operator, no `not`, a number plus one, False for True, max for
    min, and a call left out whose result is not used."""
    source = path.read_text(encoding="utf-8")
    starts = [0, *(match.end() for match in re.finditer("\n", source))]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(source[starts[line - 1] :].encode()[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        begin, end = span(left)[1], span(right)[0]
        found = re.search(r"not in|is not|in|is|and|or|[<>=!]=|//|[<>+*-]", source[begin:end])
        if found and type(operator) in SWAPS:
            yield Mutant(path, left.lineno, begin + found.start(), begin + found.end(), SWAPS[type(operator)])

    for node in code_of(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator)
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, operator)
            case ast.UnaryOp(op=ast.Not()):
                yield Mutant(path, node.lineno, span(node)[0], span(node)[0] + len("not"), "")
            case ast.Constant(value=bool(value)):
                yield Mutant(path, node.lineno, *span(node), str(not value))
            case ast.Constant(value=int(value)):
                yield Mutant(path, node.lineno, *span(node), str(value + 1))
            case ast.Call(func=ast.Name(id=name) as function) if name in NAMES:
                yield Mutant(path, node.lineno, *span(function), NAMES[name])
            case ast.Expr(value=ast.Call()):
                yield Mutant(path, node.lineno, *span(node), "pass")


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one that run: no annotations, assertions and imports."""
    skipped = ("annotation", "returns", "decorator_list")
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in (value if isinstance(value, list) else [value]) if name not in skipped else ():
            if isinstance(child, ast.AST):
                yield from code_of(child)


def default_arguments(tree: Path) -> list[str]:
    """Of pytest: the files of TESTS."""
    folders = {path.stem: path for path in (tree / "tests").rglob("test_*.py")}
    return ["-m", "not (slow or soak)", *(str(folders[name]) for name in TESTS)]


def failure(tree: Path, arguments: list[str]) -> str | None:
    """The first failing test, "time limit", or None. arguments: of pytest, which runs in the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "time limit"
    if not done.returncode:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[0] if failed else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--files", nargs="*", default=FILES, metavar="PATTERN", help="of the files to change, in TREE")
    parser.add_argument("--pytest", help="of pytest, in place of the list here: \"-n 2 -m 'not second' tests/model\"")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of mutants to leave out, which an earlier run has tried")
    args = parser.parse_args()
    tree = args.tree.resolve()
    files = sorted(path for pattern in args.files for path in tree.glob(pattern))
    drawn = random.Random(args.seed).sample([mutant for path in files for mutant in mutants_of(path)], args.count)
    arguments = shlex.split(args.pytest) if args.pytest else default_arguments(tree)
    if (found := failure(tree, arguments)) is not None:
        sys.exit(f"{tree}: a test fails without any change: {found}")
    survived = 0
    for number, mutant in enumerate(drawn[args.first :], args.first):
        before = mutant.path.read_text(encoding="utf-8")
        try:
            mutant.path.write_text(mutant.source(before), encoding="utf-8")
            found = failure(tree, arguments)
        finally:
            mutant.path.write_text(before, encoding="utf-8")
        survived += found is None
        place = f"{mutant.path.relative_to(tree)}:{mutant.line}"
        change = f"{before[mutant.begin : mutant.end]!r} -> {mutant.text!r}"
        print(f"{number:3} {'survived' if found is None else 'killed  '} {place} {change} {found or ''}", flush=True)
    print(f"{len(drawn) - args.first - survived} killed, {survived} survived")


if __name__ == "__main__":
    main()
