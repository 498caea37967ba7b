"""Grammars and recursive schemas as rules, and the lazy automata that they become: texts, masks, errors, limits."""

from __future__ import annotations

import itertools
import json
import random
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jsonschema
import lark
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT, Ask, Expansion, LazyAutomaton, MachineError, Recheck
from batchspec.automata.token_automaton import DEAD, ENDS, FORCED, NUM_SYMBOLS, TokenAutomaton, TokenSymbols
from batchspec.process.limited_process import Killed, LimitedProcess
from batchspec.structured import expand_process
from batchspec.structured import network as network_module
from batchspec.structured.compile_pool import Attempt, CompileProcess
from batchspec.structured.compiler import BadConstraint, Compiler
from batchspec.structured.dfa import dfa_of
from batchspec.structured.expander import Expander, _ExpandProcess
from batchspec.structured.grammar import grammar_rules
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.lazy_masks import Expander as StateExpander
from batchspec.structured.network import Network
from batchspec.structured.parse import network_of, rules_of, single_bytes
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import EMPTY, Impossible, TooLarge, optional, text
from batchspec.structured.rules import BadGrammar, Rules
from tests.helpers.automata import BEGIN, END, EOS, PATTERNS_OF_LETTERS, TOKENS, VOCABULARY, automaton
from tests.helpers.grammars import GRAMMARS, Grammar, ScarceProcess, lazy, may_follow, work
from tests.structured.exhausted_expander import ANSWERING, NOWHERE, STATES, WORKING
from tests.structured.test_structured import SCHEMAS, matches, schema_dfa

BYTES = np.ones(256, bool)
TREE = {
    "$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"},
                    "c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["v"]}},
    "$ref": "#/$defs/t",
}


def lazily(rules: Rules) -> LazyDfa:
    return LazyDfa(Network(rules, EMPTY, BYTES), thinks=False, may_begin=False)


def expanded(dfa: LazyDfa, state: int) -> Expansion:
    return StateExpander(VOCABULARY, (EOS,)).expansion(dfa, state, np.ones(VOCABULARY.num_tokens))[0]


def accepts(dfa: LazyDfa, value: str | bytes) -> bool:
    return dfa.is_final(dfa.after(ANSWER, value.encode() if isinstance(value, str) else value))


def texts(dfa: LazyDfa, count: int, seed: int = 0, most_bytes: int = 60) -> list[bytes]:
    """Texts of random walks; those that get longer than `most_bytes` are left out."""
    rng, found = random.Random(seed), list[bytes]()
    for _ in range(20 * count):
        state, data = ANSWER, bytearray()
        while len(data) <= most_bytes and len(found) < count:
            dfa.explore([state])
            following = [byte for byte in range(256) if dfa.next[state, dfa.classes[byte]]]
            if dfa.is_final(state) and (not following or rng.random() < 0.3):
                found.append(bytes(data))
                break
            data.append(rng.choice([byte for byte in following if byte < 0x80] or following))
            state = dfa.after(state, data[-1:])
    return found


def allowed(mask: Any) -> list[bool]:
    found: list[bool] = np.unpackbits(mask.view(np.uint8), bitorder="little")[: VOCABULARY.num_tokens].astype(bool).tolist()
    return found


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: " ".join(grammar.rules["S"]))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_tokens_that_may_follow_are_those_of_the_definition(grammar: Grammar, data: st.DataObject) -> None:
    """A mask agrees with what is accepted, token by token and byte by byte; in thoughts and after them too."""
    thought = data.draw(st.sampled_from([None, True, False]))
    dfa = LazyDfa(network_of("grammar", grammar.gbnf, VOCABULARY), thinks=True, may_begin=True)
    state, out = {None: ANSWER, True: THOUGHT, False: EITHER}[thought], list[int]()
    for _ in range(8):
        found = expanded(dfa, state)
        expected = [may_follow(grammar, out, token, thought=thought) for token in range(len(TOKENS))]
        assert allowed(found.mask) == expected, out
        ways = [token for token, may in enumerate(expected) if may and token != EOS]
        assert (found.forced == ENDS) == (expected[EOS] and not ways)
        if found.forced >= 0:  # nothing but a beginning of it, or all of it, may follow
            piece = TOKENS[found.forced]
            assert all(piece[: len(TOKENS[way])] == TOKENS[way] for way in ways if len(TOKENS[way]) <= len(piece))  # type: ignore
        if not ways:
            break
        out.append(data.draw(st.sampled_from(ways)))
        after = dfa.after(state, VOCABULARY.symbols[VOCABULARY.starts[out[-1]] : VOCABULARY.starts[out[-1] + 1]].tolist())
        walked = found.states.tolist()
        assert after in walked  # the device has its place before any row gets there
        state = after


@pytest.mark.parametrize("unrolled", [32, 1])
@pytest.mark.parametrize("pattern", PATTERNS_OF_LETTERS)
def test_a_lazy_automaton_has_the_masks_of_the_finite_one(pattern: str, unrolled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So tokens do not depend on whether an automaton was compiled within its limits."""
    monkeypatch.setattr(network_module, "UNROLLED", unrolled)
    made = automaton(pattern, thinks=True)
    rules = Rules(regex_node(pattern))
    dfa = LazyDfa(Network(rules, optional(text("\n")), single_bytes(VOCABULARY)), thinks=True, may_begin=True)
    pairs, todo = {(DEAD, DEAD)}, [(made.answer, ANSWER), (made.thought, THOUGHT), (made.either, EITHER)]
    while todo:
        ours, lazy = todo.pop()
        if (ours, lazy) in pairs:
            continue
        pairs.add((ours, lazy))
        found = expanded(dfa, lazy)
        assert allowed(found.mask) == made.allowed(ours).tolist()
        assert found.forced == made.table[ours, FORCED]
        for token in np.flatnonzero(made.allowed(ours)).tolist():
            if token != EOS:
                symbols = VOCABULARY.symbols[VOCABULARY.starts[token] : VOCABULARY.starts[token + 1]].tolist()
                todo.append((made.walk(ours, [token]), dfa.after(lazy, symbols)))
    assert len(pairs) > 3


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_a_lazy_automaton_has_the_texts_of_the_finite_one(schema: Any) -> None:
    finite, dfa = schema_dfa(schema), lazily(rules_of("schema", json.dumps(schema)))
    rng = random.Random(1)
    for data in texts(dfa, 15, most_bytes=120):
        assert matches(finite, data)
        for _ in range(10):
            at = rng.randrange(len(data) + 1)
            other = data[:at] + bytes([rng.choice(b'{}[]:,"0123 a-.')]) + data[at + rng.randrange(2) :]
            assert matches(finite, other) == accepts(dfa, other), other


SUM = r"""
?start: sum
?sum: product | sum ("+" | "-") product -> add
?product: atom | product ("*"|"/") atom
?atom: NUMBER | "-" atom | "(" sum ")" | NAME | "max"i "(" [sum ("," sum)*] ")" | /k[aeiou]{2}/i | "x" ~ 2..3 | STRING
NAME: "a".."c"
%import common (NUMBER, WS_INLINE)
%import common.ESCAPED_STRING -> STRING
%ignore WS_INLINE
"""


def test_a_grammar_of_lark_has_the_texts_that_lark_parses() -> None:
    parser, dfa = lark.Lark(SUM, parser="earley", lexer="dynamic_complete"), lazily(grammar_rules(SUM))

    def parses(data: bytes) -> bool:
        try:
            parser.parse(data.decode())
        except (lark.LarkError, UnicodeDecodeError):
            return False
        return True

    known = [b"1 + 2*-(a)", b"MAX(1, b ,c)", b"kEi", b"xxx/xx", b'"a\\"b" + 1.5e3', b" ( ( 1 ) ) "]
    assert all(accepts(dfa, one) for one in known)
    rng, wrong = random.Random(2), 0
    for data in (*known, *texts(dfa, 25, most_bytes=14)):
        assert parses(data), data
        for _ in range(4):
            at = rng.randrange(len(data) + 1)
            other = data[:at] + bytes([rng.choice(b"1a+ ()x,")]) + data[at + rng.randrange(2) :]
            if b'"' not in other:  # Lark's own strings may hold quotes
                assert parses(other) == accepts(dfa, other), other
                wrong += not accepts(dfa, other)
    assert wrong > 20


@pytest.mark.parametrize("grammar", GRAMMARS[:5], ids=lambda grammar: " ".join(grammar.rules["S"]))
def test_both_syntaxes_give_the_same_grammar(grammar: Grammar) -> None:
    ours, other = lazily(grammar_rules(grammar.gbnf)), lazily(grammar_rules(grammar.lark))
    found = texts(ours, 20)
    assert len(set(found)) > 3
    assert all(accepts(other, data) for data in found)
    assert all(accepts(ours, data) for data in texts(other, 20))


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        ('root ::= [a-c]+ "-" [^a-c\\n]{2} | "\\u00e9\\x41\\"" # a comment\n', ["ab-xy", 'éA"'], ["ab-ay", "-xy", "é"]),
        ('root ::= item*\n  | "none"\nitem ::= "- " [^\\n]+ "\\n"', ["- a\n- b\n", "", "none"], ["- a", "none\n"]),
        ("root ::= ws . ws\nws ::= [ \\t]*", [" é\t", "\n"], ["", "ab"]),
        ('root ::= ("a" | "b"){2,3} c?\nc ::= [\\]\\-x]', ["ab", "bba]", "aa-"], ["a", "abab", "abz"]),
        ("root ::= [a-] [^]", ["-x", "a]"], ["bx", "a"]),
        ('root ::= root "a" | root | "b"', ["b", "baa"], ["", "a", "ab"]),
        ('start: A+ "." \nA: "x" | /[0-9]+/', ["x12x."], ["x12x", "."]),
    ],
)
def test_a_grammar_without_recursion_has_a_finite_automaton(source: str, yes: list[str], no: list[str]) -> None:
    rules = grammar_rules(source)
    node = rules.inlined()
    assert node is not None
    finite, dfa = dfa_of(node), lazily(rules)
    for value, expected in [*((one, True) for one in yes), *((one, False) for one in no)]:
        assert matches(finite, value.encode()) == accepts(dfa, value) == expected, value


def test_a_schema_may_refer_to_itself_to_any_depth() -> None:
    rules = rules_of("schema", json.dumps(TREE))
    assert rules.inlined() is None
    dfa = lazily(rules)
    deep = '{"v":1,"c":[' * 40 + '{"v":2}' + "]}" * 40
    assert accepts(dfa, deep)
    assert not accepts(dfa, deep[:-1])
    found = texts(dfa, 20, most_bytes=200)
    for data in found:
        jsonschema.validate(json.loads(data), TREE)
    assert len(set(found)) > 5
    array = {"type": "array", "items": {"$ref": "#/$defs/b"}}
    mutual = {"$defs": {"a": array, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}, "$ref": "#/$defs/a"}
    assert accepts(lazily(rules_of("schema", json.dumps(mutual))), "[1, [[], 1]]")


def test_an_ambiguous_grammar_and_a_long_count_take_few_places() -> None:
    dfa = lazily(grammar_rules('root ::= root "+" root | "(" root ")" | [0-9]'))
    assert accepts(dfa, "1+(2+3)" + "+4" * 400)
    assert not accepts(dfa, "1+" * 400)
    assert dfa.num_states < 40
    dfa = lazily(grammar_rules('root ::= "<" [a-z]{3,90000} ">"'))
    assert accepts(dfa, "<" + "a" * 5000 + ">")
    assert not accepts(dfa, "<aa>")


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("root ::= a", BadGrammar, "'root' names 'a', which is not a rule"), ('a ::= "x"', BadGrammar, "no rule `root`"),
        ('root ::= "a', BadGrammar, "line 1: '\"a' is not supported"),
        ('root ::= "a"\n\n) "x"', BadGrammar, r"line 3: '\)' does not begin a rule"),
        ('root ::= "a"\nroot ::= "b"', BadGrammar, "line 2: rule 'root' is defined twice"),
        ("root ::= (", BadGrammar, "not closed"), ("root ::= [z-a]", BadGrammar, "ends before it begins"),
        ('root ::= "a"{3,2}', BadGrammar, "a repetition count"), ("root ::= * ", BadGrammar, "where a part of a rule must be"),
        ('root ::= "\\ud800"', BadGrammar, "is not a character"), ("", BadGrammar, "not a Lark grammar"),
        ("start: x", BadGrammar, "not a Lark grammar .*'x' used but not defined"),
        ("start: /(?=a)/", BadGrammar, "not a Lark grammar"), ("start: /a(?=b)/", BadGrammar, "terminal .*lookahead"),
        ("%import .secret.X\nstart: X", BadGrammar, "only what `common` has"),
        ("%import os.X\nstart: X", BadGrammar, "only what `common` has"),
        ('root ::= a\na ::= b "x" | "z"\nb ::= a | "y"', BadGrammar, "begins with itself, by 'a' -> 'b' -> 'a'"),
        ('root ::= e root "a" | "b"\ne ::= "c"?', BadGrammar, "rule 'root' begins with itself"),
        ('root ::= root "a"', Impossible, "no text"), ('root ::= "a" root', Impossible, "no text"),
        ("root ::= []", Impossible, "no text"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(source: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as refused:
        lazily(grammar_rules(source))
    assert "\n" not in str(refused.value)


def test_what_leads_to_no_end_cannot_be_begun() -> None:
    dfa = lazily(
        grammar_rules('root ::= "b" root "b" | "a" "d" endless | "c"\nendless ::= "c" endless | [] | "d" endless endless')
    )
    assert accepts(dfa, "bbcbb")
    assert dfa.after(ANSWER, b"a") == dfa.after(ANSWER, b"bba") == DEAD


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY, (EOS,), thinks=False, may_begin=False)


def test_the_compiler_reports_whether_a_constraint_is_an_automaton_or_lazy(compiler: Compiler) -> None:
    assert isinstance(compiler.compile("grammar", 'root ::= "ab" | "c"'), TokenAutomaton)
    source = GRAMMARS[0].gbnf
    assert compiler.compile("grammar", source) == LazyAutomaton("grammar", source)
    assert isinstance(compiler.compile("regex", "(a|b){90000}"), LazyAutomaton)
    assert compiler.stats.lazy["it is recursive"] == 1
    assert len(compiler.stats.lazy) == 2
    # The vocabulary has no x: the empty text alone can be written.
    assert isinstance(compiler.compile("grammar", 'root ::= "xyz" root | ""'), LazyAutomaton)
    for source, code in (('root ::= "x" root "a" | "y"', "impossible"), ("root ::= (", "bad_schema")):
        with pytest.raises(BadConstraint) as refused:
            compiler.compile("grammar", source)
        assert refused.value.code == code


@pytest.mark.second
def test_a_process_finds_the_states_and_one_that_dies_loses_its_epoch(compiler: Compiler) -> None:
    expander, here = Expander(compiler.job), work()
    lazy = LazyAutomaton("grammar", GRAMMARS[0].gbnf)
    first = Ask(lazy, ANSWER, (3, 3), 7, True)
    found, expected = expander.submit(first).result(60), here.answer(first)
    assert isinstance(found, Expansion)
    assert isinstance(expected, Expansion)
    assert found is not None
    assert found.state == expected.state
    assert found.mask.tolist() == expected.mask.tolist()
    dead = expander.submit(Ask(lazy, ANSWER, (4,), 7, True)).result(60)
    assert isinstance(dead, Expansion)
    assert dead is not None
    assert dead.state == DEAD
    process = expander._lanes[0].process
    assert process._process is not None
    process._process.kill()
    assert expander.submit(first).result(60) is None  # another process can answer it: the row asks again
    assert expander.submit(first).result(60) is None  # its numbers mean nothing to the next process
    again = expander.submit(Ask(lazy, ANSWER, (3, 3), 8, True)).result(60)
    assert isinstance(again, Expansion)
    assert again is not None
    assert again.mask.tolist() == found.mask.tolist()
    assert again.ahead == ()


@pytest.mark.second
def test_a_slow_automaton_keeps_no_other_one_waiting_and_stays_with_its_process(compiler: Compiler) -> None:
    expander = Expander(compiler.job, num=2)
    slow, quick = (LazyAutomaton("grammar", grammar.gbnf) for grammar in GRAMMARS[:2])
    first = expander.submit(Ask(slow, ANSWER, (3,), 1, True)).result(60)
    process = expander._lanes[0].process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    waits = expander.submit(Ask(slow, ANSWER, (3,), 1, True))
    found = [expander.submit(Ask(quick, ANSWER, (3,) * count, 1, True)).result(60) for count in (1, 2, 1)]
    assert not waits.done()
    process.send_signal(signal.SIGCONT)
    states = [one.state for one in (first, waits.result(60), *found) if isinstance(one, Expansion)]
    assert len(states) == 5
    assert states[0] == states[1]
    assert states[2] == states[4] != states[3]


def test_a_state_that_takes_too_long_is_an_answer_too(compiler: Compiler) -> None:
    expander = Expander(compiler.job, cpu_s=1)
    rules = " | ".join(f'"{"a" * count}" root "{"b" * count}"' for count in range(1, 40))
    slow = LazyAutomaton("grammar", f'root ::= {rules} | "c"')
    asks = [Ask(slow, ANSWER, tuple([3] * count), epoch, True) for epoch in (1, 2, 3) for count in (1, 60)]
    answers = [expander.submit(ask).result(120) for ask in asks]
    assert any(isinstance(one, str) and ("ways" in one or "takes more than" in one) for one in answers)


@pytest.mark.parametrize("error", [TooLarge("wide"), Impossible("none"), RecursionError()])
def test_a_state_that_fails_ahead_is_no_error_of_the_row_that_asked(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which states are computed ahead depends on the time they take: an error row must not."""
    lazy, expansion, told = LazyAutomaton("grammar", GRAMMARS[0].gbnf), StateExpander.expansion, list[int]()
    alone = work().answer(Ask(lazy, ANSWER, (3, 3), 1, True, reads_ahead=False))

    def failing(self: StateExpander, dfa: LazyDfa, state: int, *more: Any) -> Any:
        told.append(state)
        if len(told) > 1:
            raise error
        return expansion(self, dfa, state, *more)

    monkeypatch.setattr(StateExpander, "expansion", failing)
    monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)
    found = work().answer(Ask(lazy, ANSWER, (3, 3), 1, True))
    assert len(told) == 2
    assert isinstance(found, Expansion)
    assert isinstance(alone, Expansion)
    assert (found.state, found.mask.tolist(), found.ahead) == (alone.state, alone.mask.tolist(), ())


class Failing(list[Any]):
    """A list with one append that raises MemoryError."""

    left = -1

    def append(self, value: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        super().append(value)


@pytest.mark.second
@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
@pytest.mark.parametrize("name", ["_sets", "_stacks"])
def test_memory_that_runs_out_while_a_state_is_numbered_gives_no_number_twice(
    name: str, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while states are computed ahead: the process must end, because its memory is short for the next ask too."""
    monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)
    texts = [tokens for count in (1, 2, 3, 4) for tokens in itertools.product(range(3, 8), repeat=count)]
    ask, checks = Ask(lazy(grammar), ANSWER, (), 1, True), [Recheck(lazy(grammar), ANSWER, tokens) for tokens in texts]
    right, num_failed = [work().recheck(check) for check in checks], 0
    for left in range(1, 30):
        here = work()
        here._epoch = ask.epoch
        dfa = here._known_of(lazy(grammar)).dfa
        failing, begin = Failing(getattr(dfa, name)), len(getattr(dfa, name))
        failing.left = left
        setattr(dfa, name, failing)
        with suppress(MemoryError):
            here.answer(ask)
            continue
        num_failed += 1
        assert [here.recheck(check) for check in checks] == right
    assert num_failed in (29, len(getattr(dfa, name)) - begin)


def test_after_an_error_in_batchspec_no_more_is_asked_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have left wrong states: the request is repeated in a new process, and is the row's error only if it fails there."""
    process, expansion = ScarceProcess(), StateExpander.expansion
    ask = Ask(lazy(GRAMMARS[0]), ANSWER, (3, 3), 1, True)
    assert isinstance(process.ask(ask), Expansion)
    failing = [1]

    def fails(self: StateExpander, *arguments: Any) -> Any:
        if failing[0]:
            failing[0] -= 1
            raise KeyError("place")
        return expansion(self, *arguments)

    monkeypatch.setattr(StateExpander, "expansion", fails)
    later = replace(ask, tokens=(3,))
    assert process.ask(later) is None
    assert isinstance(process.ask(replace(later, epoch=2)), Expansion)
    failing[0] = 2
    found = process.ask(replace(later, tokens=(), epoch=2))
    assert isinstance(found, str)
    assert "KeyError" in found


@pytest.mark.parametrize("other_grammar", [GRAMMARS[0], GRAMMARS[1]], ids=["another grammar", "its own grammar"])
def test_an_ask_that_fails_because_of_other_rows_states_gives_no_error(other_grammar: Grammar) -> None:
    """Neither row fails alone. The first one to ask in an epoch gets its state, so that both go on by turns."""
    process = ScarceProcess(most=60)
    one, other = (
        Ask(lazy(other_grammar), ANSWER, (4, 4, 4, 3, 3, 3, 3, 3) if other_grammar is GRAMMARS[1] else (3,) * 10, 1, True),
        Ask(lazy(GRAMMARS[1]), ANSWER, (3, 4) * 4, 1, True),
    )
    for epoch in (1, 2, 3, 4):
        first, second = (one, other) if epoch % 2 else (other, one)
        found = process.ask(replace(first, epoch=epoch))
        assert isinstance(found, Expansion)
        alone = ScarceProcess().ask(first)
        assert isinstance(alone, Expansion)
        assert found.mask.tolist() == alone.mask.tolist()
        assert process.ask(replace(second, epoch=epoch)) is None
        assert process.ask(Ask(first.automaton, found.state, (), epoch, False)) is None  # its state has lost its number


def test_an_ask_that_fails_alone_is_an_error_whatever_other_states_there_are() -> None:
    process, deep = ScarceProcess(most=60), Ask(lazy(GRAMMARS[1]), ANSWER, (3, 4) * 9, 1, True)
    assert process.ask(deep) == "full"
    found = process.ask(Ask(lazy(GRAMMARS[1]), ANSWER, (3, 4) * 4, 2, True))
    assert isinstance(found, Expansion)
    assert process.ask(Ask(lazy(GRAMMARS[1]), found.state, (3, 4) * 5, 2, False)) is None  # other states may be the cause
    assert process.ask(replace(deep, epoch=3)) == "full"


@pytest.mark.second
@pytest.mark.parametrize(
    ("where", "why"),
    [
        (WORKING, "its states take more than 4 GiB of memory"), (ANSWERING, "its states take more than 4 GiB of memory"),
        (STATES, "its texts take more than 200,000 states"),
    ],
)
def test_a_process_that_reaches_its_limits_says_so_and_is_replaced(
    where: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it reaches the limit while it writes an answer, after a part of the answer was read."""
    monkeypatch.setattr(_ExpandProcess, "module", "tests.structured.exhausted_expander")
    expander = Expander({"vocabulary": VOCABULARY, "end_ids": (EOS,), "thinks": False, "may_begin": False}, num=1)
    assert expander.recheck(Recheck(lazy(GRAMMARS[0]), ANSWER, (where, 4))).result(60) == why
    assert expander.recheck(Recheck(lazy(GRAMMARS[0]), ANSWER, (NOWHERE, 4))).result(60) == 2


@pytest.mark.second
@pytest.mark.parametrize("num_kills", [2, 3, 4])
def test_a_request_whose_process_is_killed_is_repeated(num_kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is repeated in at most three new processes; only if all are killed too, it is given up."""
    left = [0]

    def killed(process: LimitedProcess, request: object, result: Any = LimitedProcess.result) -> Any:
        if left[0]:
            left[0] -= 1
            raise Killed("the machine has too little memory")
        return result(process, request)

    job = {"vocabulary": VOCABULARY, "end_ids": (EOS,), "thinks": False, "may_begin": False}
    expander, asked = Expander(job, num=1), Recheck(lazy(GRAMMARS[0]), ANSWER, (3, 5, 4, EOS))
    compiling = CompileProcess((job, 1 << 32, 20))
    monkeypatch.setattr(LimitedProcess, "result", killed)
    left[0] = num_kills
    assert expander.recheck(asked).result(60) == (4 if num_kills < 4 else "the machine has too little memory")
    left[0] = num_kills
    answer = expander.submit(Ask(asked.automaton, ANSWER, (3,), 1, True)).result(60)
    assert answer == (None if num_kills < 4 else "the machine has too little memory")
    assert isinstance(answer, MachineError) == (num_kills == 4)
    left[0] = num_kills
    found = compiling.ask(Attempt("regex", "ab", 20, 20))
    assert found["retryable"], "the machine is the cause that there is no finite automaton"
    assert "lazy" in found if num_kills < 4 else found["code"] == "large_schema"
    compiling.close()


@pytest.mark.second
@pytest.mark.parametrize("where", [WORKING, ANSWERING])
def test_a_constraint_that_takes_all_memory_becomes_a_lazy_automaton(
    where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompileProcess, "module", "tests.structured.exhausted_compiler")
    process = CompileProcess(({}, 1 << 32, 20))
    attempts = [Attempt("regex", str(place), 20, 20, "not said") for place in (NOWHERE, where, NOWHERE)]
    answers = [process.ask(attempt)["lazy"] for attempt in attempts]
    assert answers == ["not said", "compiling it takes more than 4 GiB of memory", "not said"]
    assert "later" in process.ask(attempts[1]._replace(is_last=False))
    process.close()


def test_a_network_is_built_once_for_all_epochs_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    here, built = work(), list[str]()

    def noted(kind: str, source: str, of: TokenSymbols, *, checks: bool) -> Any:
        built.append(source)
        return network_of(kind, source, of, checks=checks)

    monkeypatch.setattr(expand_process, "network_of", noted)
    one, other = (
        Ask(LazyAutomaton("grammar", grammar.gbnf), ANSWER, (3,), 1, True, reads_ahead=False) for grammar in GRAMMARS[:2]
    )
    found = [here.answer(ask) for ask in (one, other, replace(one, epoch=2), replace(one, epoch=3), replace(other, epoch=3))]
    assert built == [one.automaton.source, other.automaton.source, other.automaton.source]  # it was not asked for in epoch 2
    states = [made.mask.tolist() for made in found if isinstance(made, Expansion)]
    assert states[0] == states[2] == states[3]
    assert states[1] == states[4]


def test_states_are_numbered_anew_in_another_epoch() -> None:
    here, lazy = work(), LazyAutomaton("grammar", GRAMMARS[0].gbnf)
    here.answer(Ask(lazy, ANSWER, (3, 3, 3), 1, True))
    (known,) = here._known.values()
    assert known.dfa.num_states > 5
    here.answer(Ask(lazy, ANSWER, (), 2, True))
    assert next(iter(here._known.values())).dfa is not known.dfa


def test_a_state_that_was_computed_ahead_equals_a_requested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)
    lazy = LazyAutomaton("grammar", GRAMMARS[2].gbnf)
    here, there = work(), work()
    first = here.answer(Ask(lazy, ANSWER, (), 1, True))
    assert isinstance(first, Expansion)
    assert first.ahead
    for one in first.ahead:
        assert there.answer(Ask(lazy, ANSWER, (), 1, True)) is not None
        asked = there.answer(Ask(lazy, one.state, (), 1, False))
        assert isinstance(asked, Expansion)
        assert (asked.mask.tolist(), asked.forced) == (one.mask.tolist(), one.forced)


def test_what_rows_write_is_what_is_computed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_process, "MAX_AHEAD", 1)
    monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)
    lazy, letters = LazyAutomaton("grammar", 'root ::= "a" root "b" | "c" root "d" | "d"'), {}
    for letter in "ac":
        here, token = work(), TOKENS.index(letter.encode())
        after = here.answer(Ask(lazy, ANSWER, (token,), 1, True))
        again = here.answer(Ask(lazy, ANSWER, (), 2, True, (token,) * 50))
        assert isinstance(after, Expansion)
        assert isinstance(again, Expansion)
        letters[letter] = [one.mask.tolist() for one in again.ahead] == [after.mask.tolist()]
    assert letters == {"a": True, "c": True}


def test_symbols_of_think_tokens_are_no_text() -> None:
    dfa = LazyDfa(network_of("grammar", 'root ::= [^a]* "a"', VOCABULARY), thinks=True, may_begin=True)
    for token in (BEGIN, END):
        symbols = VOCABULARY.symbols[VOCABULARY.starts[token] : VOCABULARY.starts[token + 1]].tolist()
        assert dfa.after(ANSWER, symbols) == DEAD
    assert dfa.classes.shape == (NUM_SYMBOLS,)
    assert regex_node("a") != optional(text("a"))
