"""Progressive packets: refinements that bring a decoded packet, in place, to INT8's quality and then to every bit.

A packet goes first and decoding starts on it. Its refinement has two levels: frames of the first add a quantised
residual to the tokens that need one, frames of the second what then lacks to the exact cache, losslessly. The format is
in `kvferry.ship.refine.message`.
"""

from kvferry.ship.refine.encode import RefinementEncoder, refine
from kvferry.ship.refine.refinement import Refinement
from kvferry.ship.refine.refiner import Refiner

__all__ = ["Refinement", "RefinementEncoder", "Refiner", "refine"]
