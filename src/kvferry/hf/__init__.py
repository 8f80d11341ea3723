"""The Hugging Face edge: load, capture, restore, observe, decode. The only room that imports transformers."""
