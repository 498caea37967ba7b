"""Requests on the host, from their arrival to their completion.

  request_state.py    one request: tokens so far, statistics, pages; when its features examine it next
  slot_table.py       the requests in slots, one array a field
  allocator.py        which request gets which slot and pages; static_batching.py: no refills (ablation)
  waiting.py          requests between their stream and a slot
  open_requests.py    requests without a completion in the caller's hands, and how it is made
  refill_policy.py    when free slots are refilled
  expected_pages.py   pages that requests will need in the end
  prefix_groups.py    rows whose first pages are the same
  prefix_plan.py      which states rows take over from prefixes, and leave for others
  launch.py           what the host keeps of launches until it reads their results
  row_feature.py      what a row may ask for beyond tokens: the moments at which a feature acts, and the features of a run
"""
