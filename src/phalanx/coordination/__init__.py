"""Where the processes of a job meet, and who says which of them they are."""
