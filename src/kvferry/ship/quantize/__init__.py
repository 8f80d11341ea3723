"""Quantisers: the torch oracle, and the door to the kernels that must give the same bytes."""

from kvferry.ship.quantize.base import Quantizer
from kvferry.ship.quantize.dispatch import Section, decode_sections, encode_sections
from kvferry.ship.quantize.registry import packet_quantizer, quantizer

__all__ = ["Quantizer", "Section", "decode_sections", "encode_sections", "packet_quantizer", "quantizer"]
