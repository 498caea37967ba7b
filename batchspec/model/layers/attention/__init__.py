"""Softmax attention over pages of K and V.

block.py        shape, weights, forward pass; paged.py: what it writes into pages and reads from them
rope_config.py  rotary embedding, from config.json; rope.py: its tables for the positions of a pass
"""
