"""One model's cache becomes another's: moments, selection, ridge, the mapper artifact. Knows tensors and snapshots."""
