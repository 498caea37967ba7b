"""The engine: requests stream through a static batch of slots and come out as completions. Begin with loop/.

  loop/      schedule, execute, process: decides every step and carries it out
  slots/     requests on the host: which one has which slot and pages, what it has, and what else it asks for
  prefill/   passes over known tokens
  rounds/    rounds on the device: draft, verify, accept, commit
  ranks/     several ranks that compute one model in lockstep
  features/  what rows may ask for beyond tokens; no other room names them
  step.py    what one step does: plain host data, which the scheduler makes and the executor reads

loop/ uses all rooms but features/; slots/ uses prefill/ and rounds/; prefill/ and ranks/ use rounds/.

The way of a row, in the order in which to read:

  loop/engine, loop/engine_run         a run, and its step: schedule, execute, process
  loop/scheduler, slots/allocator      the row, which waited in slots/waiting, gets a slot and pages
  loop/executor, prefill/passes        its prompt goes through the target, and gives the first token
  loop/round_planner, rounds/graphs    the next round: how many drafts, and which graph
  rounds/round                         draft, verify, accept, commit, catch up
  `EngineRun._process`                 the result is read; the row goes on, or leaves its slot (slots/slot_table)
  slots/open_requests                  its completion
"""
