"""The K/V cache: pages, who owns them, and attention over them.

layer_state.py    what a layer keeps of each row: K/V in pages, and tensors with one entry a slot
layout.py         K and V in memory: dtype, scales, bytes
groups.py         which layers share a page table
pages.py          the tensors and reference counts
page_tables.py    which pages each row owns, shares or gives back
prefix_states.py  recurrent states that are kept of prefixes
attention.py      chooses the backend of a batch:
  verify.py       rounds on a GPU; sharing_cost.py: whether a shared prefix is read once
  flash.py        prefill on a GPU
  ordered.py      batch-invariant, for both
  padded.py       by torch, for everything else
"""
