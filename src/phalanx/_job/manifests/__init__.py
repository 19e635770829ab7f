"""Write files to submit to a scheduler, complete, for a command of `phalanx run`: behind `phalanx manifest`.

The functions are pure: what is asked for goes in, the text comes out. The job's key is never in it: Slurm's hosts find
it in the user's configuration folder, the pods of Kubernetes have it from a Secret that the file names.
"""
