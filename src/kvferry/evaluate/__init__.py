"""What shipping a cache costs: perplexity through the cached decode path, needle retrieval, fidelity, and a sweep."""
