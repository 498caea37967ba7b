"""The cache: what layers keep of rows, in pages and row tensors, and which row owns which page.

layer_state.py    what a layer keeps of each row: pages of its tokens, and tensors with one entry a slot
page_format.py    what the cache knows of a page's content: bytes, and who makes and reads it
groups.py         which layers share a page table
kept.py           what a layer's passes are given of it
pages.py          the tensors and reference counts
page_tables.py    which pages each row owns, shares or gives back
prefix_states.py  row states that are kept of prefixes
sharing_cost.py   whether a prefix that rows share is read once
"""
