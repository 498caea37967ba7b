"""The engine: requests stream through a static batch of slots and come out as completions. Begin with engine.py.

Steps:
  engine.py             schedule, execute, process: the loop; engine_run.py: the state of one run
  scheduler.py          decides every step; step.py: what it decides, plain host data
  refill_policy.py      when free slots are refilled; refills.py: what the requests that enter slots bring to a step
  prefetch.py           requests taken from their stream before slots are free
  launch.py             what the host keeps of launches until it reads their results
  allocator.py          which request gets which slot and pages; waiting.py: the queue; static_batching.py: no refills (ablation)
  expected_pages.py     pages that requests will need in the end
  executor.py           does what a step says, and owns the device's state
  output_processor.py   adds results to requests and totals
Requests on the host:
  request_state.py      one request: tokens so far, statistics
  slots.py              all slots, one array a field
  row_feature.py        what a row may ask for beyond tokens: the places where a feature acts; features/ has them all
  completion.py         the completion of an ended request
Rounds on the device:
  round.py              draft, verify, accept, commit, catch up; verify_inputs.py: what it verifies;
                        tree_round.py: the same for trees; ablation.py: its variants
  sampling.py           logits -> the target's choice
  graphs.py             rounds as CUDA graphs; graph_pool.py: capture
  results.py            results on their way to the host, and there
  shared_prefix.py      rows whose first pages are the same
  round_planner.py      K of each round; draft_lengths.py: by measured times and acceptance; expert_reads.py: experts in them
  round_clock.py        the time between the results of two rounds
Prefill:
  prefill.py            passes over known tokens
  prefill_runner.py     puts groups of requests into slots and runs their passes between rounds
  prefill_graphs.py     short passes as CUDA graphs; prefill_shapes.py: which ones; prefill_inputs.py: their inputs
  prefill_cost.py       the time of a pass
  expected_passes.py    the shapes that passes of the surveyed rows will most likely have
  refill_times.py       the fixed time of refills, learned from the run
Several ranks for one model:
  lockstep.py           the leader decides, all execute; messages.py: what it sends
  vocabulary.py         choices among the tokens of the vocabulary; vocabulary_of_ranks.py: each rank has a part of it;
                        cutoff_of_ranks.py: top-k, top-p, min-p of these
"""
