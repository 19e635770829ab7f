"""The command line has one file per command, which is loaded when the command is used."""
