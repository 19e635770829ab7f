"""The command line has one module per command, imported when the command is used."""
