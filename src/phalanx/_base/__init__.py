"""Hold what every other package uses: deadlines, processes, descriptors, numbers of the core, torch's names."""
