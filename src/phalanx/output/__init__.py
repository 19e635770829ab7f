"""What the ranks print: split into lines and live status, folded over ranks, written with the rank in front."""
