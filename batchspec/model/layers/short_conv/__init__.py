"""Short convolutions between two gates (LFM2).

block.py  shape, weights, forward pass
"""
