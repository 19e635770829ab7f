"""The witness has a vote in a job's succession, as a host has, and runs elsewhere.

address         its address: HOST:PORT, etcd://…
witness         its vote, kept in a register: a value with compare-and-swap
register        such a register at a `phalanx coordinator`; and which kind an address asks for
etcd_register   one in an etcd, with the users and certificates of `etcd_login`
json_service    one request to an etcd
calls, trial    a thread that asks the witness while a job is led, and one that asks it once
"""
