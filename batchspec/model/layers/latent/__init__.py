"""Latent attention (GLM-4.7-Flash), in plain torch.

block.py   shape, weights, forward pass
pages.py   the vector of each token in memory
attend.py  attention over these vectors, in two forms
"""
