"""Tools for every other package: deadlines, processes, descriptors, the core's constants, torch's names."""
