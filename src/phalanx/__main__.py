"""`python -m phalanx` is the command `phalanx`."""

from phalanx.cli.__main__ import main

main()
