"""State on the device that target, drafter and engine share: the slots' rows, flat batches of their tokens, masks of logits.

device_batch.py    the state of all slots; slot_field.py: how a field of it is declared
flat_batch.py      the tokens that one forward pass reads; uniform_layout.py: with as many of each row
sampling_mode.py   which steps of sampling the rows need
logits.py          all rules that mask or bias logits; logit_rule.py: what a rule is
logit_bias.py, bad_words.py, no_repeat_ngram.py: the rules of options of rows
images.py          images of rows; image_inputs.py: what a pass reads of them
automata.py        automata of constrained rows
row_commands.py    what features of rows ask of the device between two launches
upload.py          copies of host numbers, for which the host does not wait
"""
