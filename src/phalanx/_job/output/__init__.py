"""Show the ranks' output: split into lines and live status, folded over ranks, with the rank in front."""
