"""Show what the ranks print: split into lines and live status, folded over ranks, with the rank in front."""
