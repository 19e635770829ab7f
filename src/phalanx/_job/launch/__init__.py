"""The launcher: from the words of `phalanx run` to an agent on each host."""
