"""Starting jobs: `phalanx run` on one host, from the command's words to the last process gone.

    settings, target      what was asked for, checked before anything starts
    devices, placement    how many ranks, which cores and threads each
    environment           the variables that a rank sees
    agent                 the process that the user started: signals, restarts, the exit code
    zygote                imports torch once and forks the ranks; kills every descendant when the agent dies
    worker                turns the fork into the user's `python script.py`
    output                lines with their rank, folded; status lines
    failure               which failure came first, and how it is told

Nothing here imports torch, except the zygote, inside a function: that is what it is for.
"""
