"""The same tiny models as the command line's tests."""

from tests.cli.conftest import gemma_folder, llama_folder, other_llama_folder, text_file

__all__ = ["gemma_folder", "llama_folder", "other_llama_folder", "text_file"]
