"""Show the ranks' output: split it into lines and live status, fold identical lines, and prefix each with its ranks."""
