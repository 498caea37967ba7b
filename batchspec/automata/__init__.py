"""Constraints as automata over tokens: what `structured/` compiles and the engine follows.

token_automaton.py   all states as tables that the device walks
lazy_automaton.py    states that are computed when rows reach them
"""
