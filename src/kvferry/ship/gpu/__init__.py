"""The codec on a GPU: Triton kernels that give the bytes of the torch oracle, behind the same door as the native ones.

Triton is loaded when the first tensor on a GPU arrives, and not before: the package works without it.
"""

from kvferry.ship.gpu.door import available, decode_rows, encode_rows, why_not

__all__ = ["available", "decode_rows", "encode_rows", "why_not"]
