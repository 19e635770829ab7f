"""Examine this host, try to train on it, and give advice on each problem, for `phalanx doctor`.

`host`, `driver` and `trial` gather the facts, pure functions in `checks` check them, and `report` prints the findings;
so a test can use the facts of any host.
"""
