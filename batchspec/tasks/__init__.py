"""Tasks: what a job does to each row. Each is one file, and `base.py` has their protocol.

The core names no task: configuration, admission, planner, engine, tables and reports ask the task of their job. What a task reads
of the model is a `Reads`, for which the engine has a reader (`engine/features/`). These modules import neither torch nor Arrow,
because the configuration is checked without them.

  base.py            the protocol `Task`, what it reads of rows (`TaskRows`) and of the model (`Reads`)
  registry.py        every task, and which one a configuration asks for
  auto.py            task=auto, once the model is known
  generate.py        decode answers
  score_prompts.py   decode.score=prompts: log-probabilities of the prompts' tokens
  choose.py          decode.score=choices: how likely each of some texts follows; choices.py: their prompts and probabilities
  reward.py          task=reward: the scores of a model's labels after the last token
  rerank.py          task=rerank: how well a document answers a query, by the logits of yes and no
  embed.py           task=embed: a vector of each text
"""
