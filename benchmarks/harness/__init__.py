"""What every benchmark here shares: interleaved rounds, medians, a table to read and a JSON file to keep.

A benchmark compares contestants in one command. A script in `benchmarks/<question>/` starts with

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import harness
"""

from harness.record import add_output_arguments, describe_machine, write_results
from harness.rounds import Summary, interleave, plan_rounds, summarise
from harness.table import format_ratio, format_table, format_time, print_table

__all__ = [
    "Summary",
    "add_output_arguments",
    "describe_machine",
    "format_ratio",
    "format_table",
    "format_time",
    "interleave",
    "plan_rounds",
    "print_table",
    "summarise",
    "write_results",
]
