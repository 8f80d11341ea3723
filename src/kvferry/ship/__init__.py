"""Ship: importance, tiers, quantisers, packets. Takes and gives tensors and snapshots; needs no model at hand."""
