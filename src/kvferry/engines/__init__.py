"""kvferry inside running systems: thin; all thinking stays below."""
