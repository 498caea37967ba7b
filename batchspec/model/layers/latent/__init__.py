"""Latent attention (GLM-4.7-Flash).

block.py    shape, weights, forward pass
pages.py    the vector of each token in memory
store.py    norm, rotation and write of these vectors
plan.py     what computes a batch
attend.py   attention over these vectors in two forms, in plain torch
verify.py   the absorbed form on a GPU, for rounds
prefill.py  the expanded form on a GPU
"""
