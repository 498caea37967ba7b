"""Whether rules have texts: by what their nodes say, and as the automaton has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.structured.dfa import dfa_of
from batchspec.structured.emptiness import Texts, marked, texts_of
from batchspec.structured.regular import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Graph,
    Impossible,
    Joined,
    LeftOut,
    Members,
    Node,
    Ref,
    Repeat,
    Seq,
    text,
)
from batchspec.structured.rules import Rules

A, B = text("a"), text("b")
LEFT = LeftOut((), "left out")


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (EMPTY, Texts.SOME), (NOTHING, Texts.NONE), (LEFT, Texts.LEFT_OUT), (Chars(()), Texts.NONE),
        (Seq((A, LEFT)), Texts.LEFT_OUT), (Seq((LEFT, NOTHING)), Texts.NONE), (Alt((LEFT, NOTHING)), Texts.LEFT_OUT),
        (Alt((LEFT, A)), Texts.SOME), (Repeat(LEFT, 0, 3), Texts.SOME), (Repeat(LEFT, 1, 3), Texts.LEFT_OUT),
        (Joined(NOTHING, A), Texts.NONE), (Members(((LEFT, False), (A, True)), B), Texts.SOME),
        (Members(((LEFT, True), (NOTHING, False)), B), Texts.LEFT_OUT), (Members(((LEFT, True), (NOTHING, True)), B), Texts.NONE),
        (Graph((((LEFT, 1), (A, 2)), (), ((NOTHING, 1),)), frozenset({1})), Texts.LEFT_OUT),
        (Graph((((A, 1),), ((A, 0), (LEFT, 2)), ()), frozenset({2})), Texts.LEFT_OUT),
        (Graph((((A, 1),), ()), frozenset({1})), Texts.SOME), (Graph((((NOTHING, 1),), ()), frozenset({1})), Texts.NONE),
    ],
)
def test_a_language_is_empty_by_proof_or_because_texts_were_left_out(node: Node, found: Texts) -> None:
    assert texts_of(Rules(node)) == (found, "left out" if found is Texts.LEFT_OUT else "")
    assert isinstance(marked(node, "said"), LeftOut) == (found is not Texts.SOME)


def test_a_rule_that_refers_to_itself_has_a_text_only_if_it_can_end() -> None:
    for inner, found in ((A, Texts.SOME), (NOTHING, Texts.NONE), (LEFT, Texts.LEFT_OUT)):
        rules: dict[str, Node] = {"x": Alt((Seq((B, Ref("y"))), inner)), "y": Seq((Ref("x"), A))}
        assert texts_of(Rules(Ref("y"), rules))[0] is found


def test_what_is_said_is_of_a_node_that_every_text_needs() -> None:
    """An optional member that is left out is not the reason."""
    members = Members(((LeftOut((), "optional"), False), (LeftOut((), "required"), True)), B)
    assert texts_of(Rules(Seq((A, members)))) == (Texts.LEFT_OUT, "required")


NODES = st.recursive(
    st.sampled_from([A, B, EMPTY, NOTHING, Chars(())]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: Seq(tuple(parts))),
        st.lists(inner, max_size=3).map(lambda parts: Alt(tuple(parts))),
        st.builds(lambda part, least: Repeat(part, least, least + 1), inner, st.integers(0, 2)), st.builds(Joined, inner, inner),
        st.builds(lambda items: Members(tuple(items), B), st.lists(st.tuples(inner, st.booleans()), max_size=3)),
        st.builds(lambda one, back, last: Graph((((one, 1),), ((back, 0), (last, 2)), ()), frozenset({2})), inner, inner, inner),
    ),
    max_leaves=8,
)


@given(NODES)
def test_a_node_has_a_text_if_and_only_if_its_automaton_has_one(node: Node) -> None:
    try:
        dfa_of(node)
        has_text = True
    except Impossible:
        has_text = False
    assert (texts_of(Rules(node))[0] is Texts.SOME) == has_text
