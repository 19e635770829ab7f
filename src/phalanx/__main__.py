"""Run the command `phalanx` as `python -m phalanx`."""

from phalanx.cli.__main__ import main

main()
