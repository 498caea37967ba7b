"""Count what becomes of the schemas in a folder: finite automata, lazy ones, refusals by keyword; and validate texts of each.

    python jobs/count_schemas.py FOLDER MODEL [--count 600] [--seconds 6] [--texts 5] [--seed 0]

FOLDER holds one schema a file (*.json, in subfolders too), as the folder `data` of github.com/guidance-ai/jsonschemabench; MODEL
is a model's folder, for its tokenizer. Of each compiled schema some random texts are written, which the package jsonschema must
accept by the draft that the schema declares. Exit code 1 if it rejects one. Needs `pip install jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from batchspec.automata.lazy_automaton import ANSWER, LazyAutomaton
from batchspec.automata.token_automaton import NEXT, TokenAutomaton, TokenSymbols
from batchspec.model.tokenizer import Tokenizer
from batchspec.structured.compiler import BadConstraint, Compiler
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.parse import network_of
from batchspec.structured.regular import TooLarge

LONG_BYTES = 300
"""After so many bytes a text takes the shortest way to its end."""
LONGEST_BYTES = 20_000
CLOSING = b'"}]0e'
"""What a text of a lazy automaton prefers after LONG_BYTES; one that has not ended after LONGEST_BYTES is given up."""
KEYWORD = re.compile(r"/([A-Za-z$]+)(?:=[^:]*)?(?: (?:beside|is not|must)|: )")


def texts_of(made: TokenAutomaton | LazyAutomaton, end_id: int, of: TokenSymbols, count: int, seed: int) -> list[bytes]:
    """Texts of random walks over bytes."""
    rng = random.Random(seed)
    if isinstance(made, LazyAutomaton):
        dfa = LazyDfa(network_of(made.kind, made.source, of), thinks=False, may_begin=False)
        found = (_of_lazy(dfa, rng) for _ in range(count))
        return [text for text in found if text is not None]
    final = made.masks[made.table[:, 0], end_id // 32] >> end_id % 32 & 1 == 1
    final[0] = False
    left = _distances(made.table[:, NEXT:], final)
    return [_of_table(made, final, left, rng) for _ in range(count)]


def _distances(following: Any, final: Any) -> Any:
    """By state the number of steps to the nearest final one."""
    sources, columns = np.nonzero(following)
    targets = following[sources, columns]
    order = np.argsort(targets, kind="stable")
    sources, begin = sources[order], np.searchsorted(targets[order], np.arange(len(final) + 1))
    left = np.where(final, 0, 1 << 30)
    level, steps = np.flatnonzero(final), 0
    while len(level):
        steps += 1
        before = np.unique(np.concatenate([sources[begin[state] : begin[state + 1]] for state in level.tolist()]))
        level = before[left[before] > steps]
        left[level] = steps
    return left


def _of_table(made: TokenAutomaton, final: Any, left: Any, rng: random.Random) -> bytes:
    bytes_of = defaultdict[int, list[int]](list)
    for byte, one in enumerate(made.classes[:256].tolist()):
        bytes_of[one].append(byte)
    state, text = made.answer, bytearray()
    while True:
        row = made.table[state, NEXT:]
        ways = [one for one in np.flatnonzero(row).tolist() if bytes_of[one]]
        long = len(text) > LONG_BYTES
        if final[state] and (not ways or long or rng.random() < 0.3):
            return bytes(text)
        taken = min(ways, key=lambda one: left[row[one]]) if long else rng.choice(ways)
        text.append(rng.choice(bytes_of[taken]))
        state = int(row[taken])


def _of_lazy(dfa: LazyDfa, rng: random.Random) -> bytes | None:
    state, text = ANSWER, bytearray()
    while len(text) < LONGEST_BYTES:
        dfa.explore([state])
        ways = np.flatnonzero(dfa.next[state, dfa.classes[:256]]).tolist()
        long = len(text) > LONG_BYTES
        if dfa.is_final(state) and (not ways or long or rng.random() < 0.3):
            return bytes(text)
        closing = [byte for byte in CLOSING if byte in ways] if long and rng.random() < 0.9 else []
        text.append(closing[0] if closing else rng.choice(ways))
        state = int(dfa.next[state, dfa.classes[text[-1]]])
    return None


def refusal(error: BadConstraint) -> str:
    """A short name of why: the keyword, or the code."""
    found = KEYWORD.findall(str(error))
    return f"refused: {found[-1] if found and error.code == 'bad_schema' else error.code}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=600, help="number of schemas, drawn at random")
    parser.add_argument("--seconds", type=int, default=6, help="CPU limit of each")
    parser.add_argument("--texts", type=int, default=5, help="texts of each that are validated")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    files = sorted(args.folder.rglob("*.json"))
    drawn = random.Random(args.seed).sample(files, min(args.count, len(files)))
    tokenizer = Tokenizer(args.model)
    size = 1 + max(tokenizer.encode("<|im_end|>"), default=0)
    size = max(size, len(json.loads((args.model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]))
    symbols, end_id = tokenizer.symbols(size, {}), 0
    compiler = Compiler(symbols, (end_id,), thinks=False, may_begin=False, cpu_s=args.seconds)
    sources = {file: json.dumps(json.loads(file.read_text(encoding="utf-8"))) for file in drawn}
    counts, invalid, nbytes = Counter[str](), 0, list[int]()
    for file, begun in [(file, compiler.begin("schema", source)) for file, source in sources.items()]:
        made = begun.result()
        if isinstance(made, BadConstraint):
            counts[refusal(made)] += 1
            print(f"{file}: {made}", file=sys.stderr)
            continue
        counts["lazy" if isinstance(made, LazyAutomaton) else "finite"] += 1
        nbytes += [made.nbytes] if isinstance(made, TokenAutomaton) else []
        schema = json.loads(sources[file])
        draft = validator_for(schema, default=Draft202012Validator)
        try:
            draft.check_schema(schema)
        except SchemaError:
            counts["compiled, and not valid by its draft: texts not checked"] += 1
            continue
        try:
            texts = texts_of(made, end_id, symbols, args.texts, args.seed)
        except TooLarge as error:
            print(f"{file}: {error}", file=sys.stderr)
            continue
        for text in texts:
            try:
                wrong = next(draft(schema).iter_errors(json.loads(text)), None)
            except Exception as error:  # what the package cannot validate with, as a reference to another document
                counts[f"text not checked: {type(error).__name__}"] += 1
                continue
            counts["text valid" if wrong is None else "text INVALID"] += 1
            invalid += wrong is not None
            if wrong is not None:
                print(f"{file}: INVALID {text[:300]!r}: {wrong.message[:200]}", file=sys.stderr)
    print("\n".join(f"{count:>7,}  {name}" for name, count in counts.most_common()))
    stats = compiler.stats
    print(f"finite: {stats.seconds / max(1, stats.num_compiled):.2f} s of CPU time on average, longest {stats.longest_s:.1f} s, "
          f"{np.median(nbytes) / 1e6:.1f} MB in the median, {np.mean(nbytes) / 1e6:.1f} MB on average")
    return 1 if invalid else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
