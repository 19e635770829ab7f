"""`phalanx top` shows a running job as it goes; no rank is asked, and none does anything for it.

look      what is seen of the ranks of one host at one moment: recorders, pages, memory
times     how a rank's time divides: computing, waiting for others, moving data; who came last
view      what several looks say of the job
table     the view as lines of text
json      the view as data
watch     look again and again, of all hosts, in a thread
screen    the terminal: drawing, keys, another size, the end
"""
