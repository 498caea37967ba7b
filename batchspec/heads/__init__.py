"""Draft heads: training one from completions, prompts to train on, and how to read a head that others trained.

Nothing else imports this package; `batchspec train`, `prompts` and `probe` start it. The module train_schema of config has the
keys of train.

command.py     `batchspec train`: its arguments and first checks
training.py    what it does
folder.py      the output folder
data.py        completions as batches of rows
teacher.py     the target's hidden states and distributions
head.py        shape and initial weights
network.py     the head as trainable network; layer.py, attend.py, fused.py: its parts
objective.py   the loss
optimise.py    AdamW, Muon
loop.py        the course of a training: batches, learning rate, checkpoints
evaluate.py    acceptance on the target's own outputs
save.py        the trained head as a checkpoint
prompts.py     `batchspec prompts`: a chat model writes prompts
probe.py       which hidden states a head was trained with, by acceptance; probe_command.py: `batchspec probe`
"""
