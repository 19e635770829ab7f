"""Show the ranks' output: split it into lines and live status, fold equal lines of ranks, and prefix the rank."""
