"""Attention and a Mamba2 layer beside each other (Falcon-H1).

block.py  shape, weights, forward pass
"""
