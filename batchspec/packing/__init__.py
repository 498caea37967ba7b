"""Packing: from input rows to the stream of requests and the shape of the batch that decodes them.

Rows to requests:
  admit.py            each row becomes requests, or a completion that says why not
  cells.py            its cells as checked values
  row_settings.py     its settings, or the job's; row_logprobs.py: whether rows ask for log-probabilities
  bad_words.py        the token sequences of its bad_words; no_repeat_ngram.py: its n-grams that do not come twice
  row_templates.py    its prompt and system prompt, if templates make them of its columns
  prompt_encoder.py   its prompt's token ids; prompt_images.py: its images
  constraints.py      what its answer must match; row_constraints.py: in which jobs
  tool_choice.py      which of its tools it may call, or must
  unused.py           keys and columns that would have no effect
  input_notes.py      columns that no row reads, and texts for a chat model
  model_notes.py      lines for the user about a model's files: unread keys, recommended sampling, no end token
The stream:
  work_plan.py        what a run does with each output row
  order.py            the order in which requests enter; predict.py: predicted output lengths
  ordered_requests.py requests in that order, a window of shards at a time
  ready_requests.py   those whose automata are compiled, before others
  equal_rows.py       equal greedy rows are computed once
  open_shards.py      shards whose rows are not all finished
  feed.py             from claimed shards to the stream, and from completions to complete shards
The shape:
  survey.py           lengths of the first rows
  planner.py          slots, pages, row buckets; the forecast
  image_cost.py       seconds of encoding images and of decoding them
  job_time.py         which number of slots is fast, and how many drafts pay; expected_drafts.py: how many are accepted
  cost.py             seconds of rounds and prefill; exchange.py: of exchanges between ranks; rates.py: how fast a device is
  memory.py           GPU memory that must stay free; kv_memory.py: K/V pages in the rest; device_memory.py: what is free
  replicas.py         copies of the model, or one cut over several GPUs
"""
