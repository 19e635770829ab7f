"""Find out what each rank did last, and describe a failure: the ranks, their positions, the reason, and advice.

flight_recorder, call_sites, observer   each rank's calls, and its current place
failure_report, divergence, rank_list   the text of a failure, the same for every transport: mismatch, lost, late
failures, whereabouts                   a report made from shared memory, for an error status of the C core
failure_store, failure_signals          send a report to ranks on other hosts
step_recorder, step_machine, step_file  each rank's steps and their phases, readable after the rank has died
progress_page                           each rank's progress, readable while it runs
"""
