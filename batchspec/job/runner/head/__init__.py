"""The head that a job trains for its model on its own first answers (draft.train.kind). Changes when the course of that changes.

store.py      where heads lie, by the identity of their model; which run trains one
forecast.py   whether a training, or a head, pays for what is left of a job
planned.py    what `batchspec plan` says
abandoned.py  deletes the files of trainings that no run continues
lost_time.py  how much time a head in use has lost
process.py    `batchspec train` in a process of its own
own_head.py   what a run does about its head: gather answers, train or wait, change the drafter, or go on as before
"""
