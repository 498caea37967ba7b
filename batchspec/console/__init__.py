"""The command line as its user sees it. Everyone may import it.

arguments.py   argparse, with errors of one line
terminal.py    everything that is printed
text.py        makes untrusted text safe to print
target_file.py the local file that a command writes
"""
