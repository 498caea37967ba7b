"""Softmax attention over pages of K and V.

block.py        shape, weights, forward pass; paged.py: what it writes into pages and reads from them;
                rope_write.py: norms, rotation and write in one launch
kv_layout.py    K and V in memory; kv_scales.py: the scales of e4m3
of_model.py     the layers of a model that attend
plan.py         chooses the backend of a batch:
  verify.py     rounds on a GPU
  flash.py      prefill on a GPU
  ordered.py    batch-invariant, for both
  padded.py     by torch, for everything else
rope_config.py  rotary embedding, from config.json; rope.py: its tables for the positions of a pass
"""
