"""Find out what each rank did last, and word a failure: who, where, why, and what to do.

flight_recorder, call_sites, observer   what each rank called, and where it is
failure_report, divergence, rank_list   how a failure is worded, the same for every transport: mismatch, lost, late
failures, whereabouts                   a report made from shared memory, for a status of the C core
failure_store                           how a report reaches ranks on other hosts
"""
