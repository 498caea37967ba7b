"""This process, its children and the machine that they share. Everyone may import it.

bytecode.py        keeps Python's bytecode where it would not be kept
cgroup.py          what the control groups allow
child_process.py   starts Python programs that end with the run
early_start.py     begins slow work while modules are imported
first_signals.py   what signals do until signals.py is imported
garbage.py         keeps Python's garbage collector away from modules and models
limited_process.py processes with limits of CPU time and memory, for what comes from the input
load_progress.py   whether loading a model makes progress
local_files.py     opens regular files only
machine.py         CPUs, cache folder and limits of this process
out_of_memory.py   recognises errors of running out of memory
own_process.py     keeps forks from what belongs to the process that they are forked from
preflight.py       what the machine must give before libraries are imported
program.py         what a program does first and last
refusals.py        errors by which the machine refuses memory, threads, files, system calls
signals.py         SIGTERM, Ctrl-C: what they do in each stage of a program
threads.py         starts threads
"""
