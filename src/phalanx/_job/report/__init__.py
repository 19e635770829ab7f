"""Turn a run's records into measurements, findings, pictures and a page.

recording             whether this process records its steps, and for which folder (diagnostics.step_recorder records)
job_record            the launcher's record
gather, matching      combine the launcher's and the ranks' records into measurements
findings              measurements in, sentences out
page, pictures, …     measurements in, HTML out
trace                 the records, for Perfetto
write, compare        the files of a report; several runs side by side
"""
