"""Attention and Mamba2 that run in parallel in one layer (Falcon-H1).

block.py  shape, weights, forward pass
"""
