"""What each rank did last, and how a failure is told: who, where, why, and what to do.

flight_recorder, call_sites, observer          what is known
failures, divergence, whereabouts              how it is told: mismatch, lost peer, late peer, who stands where
failure_store                                  how it reaches ranks on other hosts
"""
