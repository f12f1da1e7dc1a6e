"""Which rows, heads and layers carry a decision: note maps and circuit readers on top of the patch engine."""
