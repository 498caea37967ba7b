"""The engine: requests stream through a static batch of slots and come out as completions. Begin with loop/.

  loop/      schedule, execute, process: decides every step and carries it out
  slots/     requests on the host: which one has which slot and pages, what it has, and what else it asks for
  prefill/   passes over known tokens
  rounds/    rounds on the device: draft, verify, accept, commit
  ranks/     several ranks that compute one model in lockstep
  features/  what rows may ask for beyond tokens; no other room names them
  step.py    what one step does: plain host data, which the scheduler makes and the executor reads

loop/ uses all rooms but features/; slots/ uses prefill/ and rounds/; prefill/ and ranks/ use rounds/.
"""
