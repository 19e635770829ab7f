"""Run MapReduce over a process group.

the call                                            map_reduce.py
its checked arguments                               map_reduce_job.py
the input of a task: splits, lines, items           splits.py  records.py
a map task: records to buckets                      map_task.py  table.py  sums.py
                                                    buckets.py  keys.py  columns.py
assigning and repeating tasks                       board.py  attempt.py  team.py
the shuffle; sorting; data on disk                  exchange.py  grouper.py  spool.py  sizes.py
the result: iterable, gathered, in files            result.py  part_files.py  counters.py
"""

from phalanx.mapreduce.counters import BadRecord, Counters
from phalanx.mapreduce.map_reduce import map_reduce
from phalanx.mapreduce.map_reduce_job import TaskError
from phalanx.mapreduce.part_files import read_parts
from phalanx.mapreduce.result import Result
from phalanx.mapreduce.splits import Records

__all__ = ["BadRecord", "Counters", "Records", "Result", "TaskError", "map_reduce", "read_parts"]
