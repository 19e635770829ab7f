"""Tools for every other package: deadlines, processes, descriptors, numbers of the core, torch's names."""
