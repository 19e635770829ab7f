"""Write complete files that submit a `phalanx run` command to a scheduler, for `phalanx manifest`.

The functions are pure: they turn a request into text. The text never contains the job's key: Slurm's hosts find it in
the user's configuration folder, and the pods of Kubernetes get it from a Secret that the file names.
"""
