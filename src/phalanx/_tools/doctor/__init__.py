"""Examine this host, try to train on it, and say for each problem what to do: behind `phalanx doctor`.

Facts are gathered in one place (`host`, `kernel`, `trial`), judged by pure functions in another (`checks`), and told
in a third (`report`), so that a test can feed the facts of a host that nobody has at hand.
"""
