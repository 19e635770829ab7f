"""Examine this host, try to train on it, and give advice on each problem, for `phalanx doctor`.

`host`, `kernel`, `driver` and `trial` gather facts, pure functions in `checks` check them, and `report` prints the
findings, so that a test can use the facts of any host.
"""
