"""Training a draft head from completions. loop.py is the course of a training.

settings.py    keys and their checks
folder.py      the output folder
data.py        completions as batches of rows
teacher.py     the target's hidden states and distributions
head.py        shape and initial weights
network.py     the head as trainable network; layer.py, attend.py, fused.py: its parts
objective.py   the loss
optimise.py    AdamW, Muon
loop.py        batches, learning rate, checkpoints
evaluate.py    acceptance on the target's own outputs
save.py        the trained head as a checkpoint
"""
