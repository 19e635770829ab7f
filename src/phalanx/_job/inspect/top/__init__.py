"""`phalanx top` shows a running job live, without any work of the ranks.

look      a snapshot of one host's ranks: recorders, pages, memory
times     the parts of a rank's time: computing, waiting for others, moving data; who is last
view      the job's state from several looks
table     the view as lines of text
json      the view as data
watch     repeated looks at all hosts, in a thread
screen    the terminal: drawing, keys, another size, the end
"""
