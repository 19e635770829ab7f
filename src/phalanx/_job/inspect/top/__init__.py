"""Show a running job live, for `phalanx top`, without any work in the ranks.

look      a snapshot of one host's ranks: recorders, progress pages, and `memory`
times     the parts of a rank's time: computing, waiting for others, moving data; the last rank
view      the job's state from several snapshots
table     the view as lines of text
as_json   the view as data
watch     repeated snapshots of all hosts
screen    the terminal: drawing, keys, resizing

`prometheus` serves the view as metrics, for `phalanx run --metrics`.
"""
