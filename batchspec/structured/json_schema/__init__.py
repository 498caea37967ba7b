"""JSON Schema as nodes of `structured/regular.py`.

schema.py         a schema's node
document.py       the whole schema: references, drafts; leaves.py: schemas that hold at once
alternatives.py   anyOf, oneOf, not, if; negation.py: the schema of what does not fit; apart.py: that no value fits two schemas
objects.py        objects; members.py: the order and number of members
arrays.py, numbers.py, strings.py  values of these types; formats.py: formats of strings
values.py         how values are written; validity.py: whether a value is valid
weaker.py         a weaker schema in place of one that is refused
"""
