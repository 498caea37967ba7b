"""State-space layers (Mamba2): Nemotron, Granite 4 H.

block.py  shape, weights, forward pass
"""
