"""The cache: what layers keep of rows, in pages and row tensors, and which row owns which page.

layer_state.py    what a layer keeps of each row: K/V in pages, and tensors with one entry a slot
layout.py         K and V in memory: dtype, scales, bytes
groups.py         which layers share a page table
pages.py          the tensors and reference counts
page_tables.py    which pages each row owns, shares or gives back
prefix_states.py  recurrent states that are kept of prefixes
sharing_cost.py   whether a prefix that rows share is read once
"""
