"""What every other room stands on: deadlines, processes, descriptors, numbers of the core, torch's names."""
