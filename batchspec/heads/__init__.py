"""Draft heads: training one, or the MTP layer of a model, from completions, prompts to train on, and how to read a head that
others trained.

Nothing else imports this package; `batchspec train`, `prompts` and `probe` start it. The module train_schema of config has the
keys of train.

command.py     `batchspec train`: its arguments and first checks
training.py    what it does
trained_drafter.py  what differs between the kinds of drafters: eagle.py, EAGLE-3 heads; block.py, DSpark heads; mtp.py, MTP
               layers
folder.py      the output folder
data.py        completions as batches of rows
teacher.py     the target's hidden states and distributions; first_norm.py: the final norm that random weights begin with
draft_network.py  a drafter as trainable network: block_network.py, a DSpark head; step_network.py, one that drafts step by step:
               network.py, an EAGLE-3 head, and mtp_network.py, an MTP layer
layer.py       their decoder layers; attend.py, block_attend.py, experts.py, fused.py: parts of these
head.py        shape and initial weights of an EAGLE-3 head; save.py, block_save.py: a trained head as a checkpoint
mtp_weights.py the weights of an MTP layer: read from a checkpoint, written as one
objective.py   cross entropy with the target's distributions
optimise.py    AdamW, Muon
loop.py        the course of a training: batches, learning rate, checkpoints
evaluate.py    acceptance on the target's own outputs
prompts.py     `batchspec prompts`: a chat model writes prompts
probe.py       which hidden states a head was trained with, by acceptance; probe_command.py: `batchspec probe`
"""
