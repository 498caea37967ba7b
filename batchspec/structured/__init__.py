"""Structured output: constraints of answers as automata over tokens, compiled in processes, and checks of finished answers.

From text to nodes:
  parse.py           the text of a constraint: schema, grammar, regex or choice
  json_schema/       JSON Schema; unsupported.py: schemas with keywords that no automaton obeys
  regex.py           regular expressions; regex_syntax.py: their syntax; regex_dialects.py: what classes and flags mean
  grammar.py         context-free grammars; gbnf.py: those of llama.cpp
  channels.py        what stands around an answer in harmony
  forced_calls.py    answers that must call tools; call_parameters.py: their parameters; tagged_values.py, gemma4_values.py: forms
                     of their values
  regular.py         the nodes of regular languages; rules.py: named rules of nodes; char_dfa.py: automata over characters
From nodes to automata:
  nfa.py, dfa.py     automata over UTF-8 bytes; emptiness.py: whether any text matches
  token_masks.py     masks of allowed tokens, which make them automata over tokens
  network.py         rules that call each other; lazy_dfa.py: an automaton whose states are computed when a text reaches them;
                     lazy_masks.py: their masks
Processes:
  compiler.py        compiles constraints and caches them; compile_pool.py, compile_process.py: where
  expander.py        computes states of lazy automata; expand_process.py: where
  answer_checker.py  checks answers by whole schemas; check_process.py: where; schema_check.py: how
checked_text.py      checks the text of a finished answer once more
"""
