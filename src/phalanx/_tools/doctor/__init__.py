"""Examine this host, try to train on it, and give advice on each problem, for `phalanx doctor`.

Facts are gathered in one place (`host`, `kernel`, `driver`, `trial`), checked by pure functions in another (`checks`),
and printed in a third (`report`), so that a test can use the facts of any host.
"""
