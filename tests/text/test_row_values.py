"""What templates of rows make of nulls: they may test and replace them, and no filter or operator writes them as text."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import UndefinedError

from batchspec.text.row_values import NullNeeded, with_nulls
from batchspec.text.template_process import environment

ROW: dict[str, Any] = {
    "q": "Q", "a": None, "tags": ["x", None], "meta": {"b": 1, "note": None, "my note": None}, "turns": [{"t": None}, {"t": "y"}],
}
SAYS_WHAT_TO_WRITE = {
    "{{ q }}{% if a %} {{ a }}{% endif %}": "Q",
    "{{ q }}{% if a is not none %} {{ a }}{% endif %}": "Q",
    "{{ q }}{% if a is defined %} {{ a }}{% endif %}": "Q",
    "{{ q }}{% if not a and q %}!{% endif %}": "Q!",
    "{% if a is none and none == a and a == none and a is sameas none %}null{% endif %}": "null",
    "{{ a or 'x' }}": "x",
    "{{ a | default('x') }}{{ a | default('x', true) }}{{ a | d('x') }}": "xxx",
    "{{ a if a else 'x' }}": "x",
    "{% set b = a or 'x' %}{{ b ~ 'y' }}": "xy",
    "{{ a == 'x' }} {{ a != 'x' }} {{ a in ['x', q] }} {{ a is string }} {{ a is iterable }}": "False True False False False",
    "{{ {'x': 1}[a] | default('other') }}": "other",
    "{% for t in a or [q] %}{{ t }}{% endfor %}": "Q",
    "{% for t in tags if t %}{{ t }}{% endfor %}": "x",
    "{% for t in tags %}{{ t or '-' }}{% endfor %}": "x-",
    "{{ tags | select | join }} {{ tags | reject('none') | join }} {{ tags | length }}": "x x 2",
    "{{ meta.note or 'x' }}{{ meta['note'] | default('x') }}{{ meta.get('note', 'x') }}": "xxx",
    "{{ q }}{% if meta.note %}{{ meta.note }}{% endif %}{{ 1 if meta.note is none else 0 }}": "Q1",
    "{% for name, value in meta.items() %}{{ name }}{{ value }}{% endfor %} {{ meta | tojson }}": 'b1 {"b": 1}',
    "{{ a.note or a['note'].more | default('x') }}": "x",
    "{{ turns | selectattr('t') | map(attribute='t') | join }}{{ turns | map(attribute='t', default='-') | join }}": "y-y",
}
"""Templates that write nothing of a null, and what they write of ROW."""
NEEDS_THE_VALUE = {
    "a": [
        "{{ a }}", "{{ a ~ 'x' }}", "{{ a + 1 }}", "{{ 1 + a }}", "{{ 'x' * a }}", "{{ -a }}", "{{ '%s' % a }}",
        "{{ '{}'.format(a) }}", "{{ [a] }}", "{{ {'k': a} }}", "{{ [a] | join }}", "{{ a | upper }}", "{{ a | string }}",
        "{{ a | trim }}", "{{ a | e }}", "{{ a | tojson }}", "{{ {'k': [a]} | tojson }}", "{{ a | int }}",
        "{{ a | float(1.0) }}", "{{ a | length }}", "{{ a | list }}", "{{ a | abs }}", "{{ a | round }}", "{{ a | join }}",
        "{{ a | replace('x', 'y') }}", "{{ '%s' | format(a) }}", "{{ a | pprint }}", "{{ a and 'x' }}", "{{ a > 1 }}",
        "{{ 'x' in a }}", "{{ a.strip() }}", "{{ a.get('x') }}", "{{ a.b.c }}", "{{ a[0] }}", "{{ range(a) | join }}",
        "{% for t in a %}{{ t }}{% endfor %}", "{% set b %}{{ a }}{% endset %}{{ b }}", "{{ a | default(a) }}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(a) }}", "{{ a | reverse }}", "{{ a | sum }}", "{{ [1, a] | sum }}",
        "{{ a | title }}",
    ],
    "tags[1]": ["{{ tags }}", "{{ tags | join }}", "{{ tags | last }}", "{{ tags | sort | join }}", "{{ tags | tojson }}"],
    "meta.note": ["{{ meta.note }}", "{{ meta.get('note') ~ 'x' }}", "{{ meta['note'] | upper }}", "{{ [meta.note] }}"],
    "meta['my note']": ["{{ meta['my note'] }}"],
    "turns[0].t": ["{{ turns | map(attribute='t') | join }}", "{% for turn in turns %}{{ turn.t }}{% endfor %}"],
}
"""A null of ROW -> templates that would write something of it."""
MISSING = [
    "{{ meta.c }}", "{% if meta.c %}{% endif %}", "{{ meta.c or 'x' }}", "{{ meta.c is none }}", "{{ [meta.c] }}",
    "{{ meta.c | tojson }}",
]


def rendered(template: str) -> str:
    variables = {name: with_nulls(value, name) for name, value in ROW.items()}
    return environment("2024-01-01", strict=True).from_string(template).render(variables)


@pytest.mark.parametrize("template", SAYS_WHAT_TO_WRITE)
def test_a_template_that_says_what_to_write_of_a_null_is_rendered(template: str) -> None:
    assert rendered(template) == SAYS_WHAT_TO_WRITE[template]


@pytest.mark.parametrize(("null", "template"), [(null, each) for null, several in NEEDS_THE_VALUE.items() for each in several])
def test_a_template_that_needs_the_value_of_a_null_is_refused(null: str, template: str) -> None:
    with pytest.raises(NullNeeded) as refused:
        rendered(template)
    assert str(refused.value) == null


@pytest.mark.parametrize("template", MISSING)
def test_a_field_that_the_row_does_not_have_is_no_null(template: str) -> None:
    """It may be misspelled: a condition that is false of every row would not show it."""
    with pytest.raises(UndefinedError, match="meta has no field 'c'"):
        rendered(template)
    assert rendered("{{ meta.c is defined }} {{ meta.c | default('x') }} {{ meta.get('c', 'y') }}") == "False x y"
