"""What a run leaves behind for people to look at: where its time went, what happened, and what to do about it.

    step_file, step_recorder (diagnostics)    each rank writes down its steps
    recording                                 when that begins and ends in a process
    job_record                                what the launcher knows
    gather, matching                          both together: measurements
    findings                                  measurements in, sentences out
    page, pictures, charts, tables, style     measurements in, HTML out
    write                                     the files of a report

A loop of one's own that has no optimizer or no backward marks its steps: `phalanx.report.phase`, `phalanx.report.step`.
"""

from __future__ import annotations
