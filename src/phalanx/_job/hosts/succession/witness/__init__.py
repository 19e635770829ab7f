"""The witness is one more voter in a job's succession. It runs outside the job.

address         its address: HOST:PORT, etcd://…
witness         its vote, stored in a register: a value with compare-and-swap at a `phalanx coordinator`
etcd_register   a register in etcd, with TLS
calls           a thread in which the leader requests votes
"""
