"""The quantisers once more, from ``docs/quantizers.md``: slow loops over numpy scalars that the oracle is held to."""

import re

import numpy as np
import torch

F = np.float32
TINY = F(2.0**-126)


def bits(value):
    return int(np.asarray(value, F).view(np.uint32))


def scale_code(scale):
    """fp32 scale -> 16-bit code."""
    if scale < TINY:
        return 0
    return min((bits(scale) + 0x4000) >> 15, 0xFEFF)


def scale_value(code):
    return np.asarray(code << 15, np.uint32).view(F)[()]


def inverse(scale):
    return F(0) if scale == 0 else F(1) / scale


def planes(codes, nbits):
    """Bytes of one row of codes."""
    row = list(codes) + [0] * (-len(codes) % 8)
    out, shift = [], 0
    for width in {8: [8], 6: [4, 2], 5: [4, 1], 4: [4], 3: [2, 1], 2: [2]}[nbits]:
        field = [code >> shift & ((1 << width) - 1) for code in row]
        count = len(row) * width // 8
        if width == 1:
            out += [sum(field[8 * j + k] << k for k in range(8)) for j in range(count)]
        else:
            out += [sum(field[j + k * count] << (k * width) for k in range(8 // width)) for j in range(count)]
        shift += width
    return bytes(out)


def group(values, nbits):
    """One asymmetric group -> (minimum, scale code, codes)."""
    if not all(np.isfinite(values)):
        return F(0), 0xFFFF, [0] * len(values)
    lo, hi = min(values), max(values)
    lo = F(0) if lo == 0 else lo
    top = (1 << nbits) - 1
    code = scale_code((hi - lo) / F(top))
    inv = inverse(scale_value(code))
    return lo, code, [int(min(max(np.rint((x - lo) * inv), F(0)), F(top))) for x in values]


def row(values, nbits):
    """One symmetric row -> (scale code, codes)."""
    if not all(np.isfinite(values)):
        return 0xFFFF, [0] * len(values)
    top = (1 << (nbits - 1)) - 1
    code = scale_code(max((abs(x) for x in values), default=F(0)) / F(top))
    inv = inverse(scale_value(code))
    return code, [int(min(max(np.rint(x * inv), F(-top)), F(top))) + top + 1 for x in values]


def hadamard(values):
    """A list of 2^k fp32 numbers times the Hadamard matrix, by butterflies."""
    values, step = list(values), 1
    while step < len(values):
        for start in range(0, len(values), 2 * step):
            for i in range(start, start + step):
                a, b = values[i], values[i + step]
                values[i], values[i + step] = a + b, a - b
        step *= 2
    return values


def rotated(values, size, nbits):
    """One rotated group, padded to ``size`` -> (scale code, codes)."""
    if not all(np.isfinite(values)):
        return 0xFFFF, [0] * size
    y = hadamard([x * F(1 / size) for x in [*values, *[F(0)] * (size - len(values))]])
    half = 1 << (nbits - 1)
    code = scale_code(max(abs(x) for x in y) * F(1 / half))
    inv = inverse(scale_value(code))
    return code, [int(min(max(np.floor(x * inv), F(-half)), F(half - 1))) + half for x in y]


def sizes(dim, group):
    """Widths of the groups of a row."""
    rest = dim % group
    return [group] * (dim // group) + ([next(2**k for k in range(20) if 2**k >= rest)] if rest else [])


def mean(rows):
    """Mean of one channel over tokens; ``rows`` holds None where a row is not finite."""
    count = F(max(1, sum(x is not None for x in rows)))
    sums = [F(0) if x is None else x for x in rows]
    while len(sums) > 1:
        sums = [sum(sums[i + 1 : i + 2], sums[i]) for i in range(0, len(sums), 2)]
    found = sums[0] * (F(1) / count)
    return F(0) if np.isnan(found) else found


def encode(spec, x):
    """Bytes of a section; ``x`` is a torch tensor ``(heads, tokens, dim)`` of the selected tokens."""
    if spec == "raw":
        return x.contiguous().view(torch.uint8).numpy().tobytes()
    with np.errstate(all="ignore"):
        return _encode(spec, x, x.to(torch.float32).numpy())


def _encode(spec, x, values):
    heads, tokens, dim = values.shape
    if spec.startswith("cen"):
        return _encode_centred(spec, x, values)
    lows, scales, packed = [], [], []
    kind, nbits = re.match("(sym|asym|chan|had)([0-9])", spec).groups()
    nbits = int(nbits)
    if kind == "sym":
        for h in range(heads):
            for t in range(tokens):
                code, codes = row(values[h, t], nbits)
                scales.append(code)
                packed.append(planes(codes, nbits))
    elif kind == "had":
        for h in range(heads):
            for t in range(tokens):
                codes, at = [], 0
                for size in sizes(dim, int(spec.split("g")[1])):
                    code, part = rotated(values[h, t, at : at + size], size, nbits)
                    at += size
                    scales.append(code)
                    codes += part
                packed.append(planes(codes, nbits))
    elif kind == "asym":
        size = dim if spec.endswith("row") else int(spec.split("g")[1])
        for h in range(heads):
            for t in range(tokens):
                codes = []
                for start in range(0, dim, size):
                    lo, code, part = group(values[h, t, start : start + size], nbits)
                    lows.append(lo)
                    scales.append(code)
                    codes += part
                packed.append(planes(codes, nbits))
    else:
        block = int(spec.split("b")[1])
        for h in range(heads):
            codes = np.zeros((tokens, dim), int)
            for start in range(0, tokens, block):
                for c in range(dim):
                    lo, code, part = group(values[h, start : start + block, c], nbits)
                    lows.append(lo)
                    scales.append(code)
                    codes[start : start + block, c] = part
            packed += [planes([int(code) for code in line], nbits) for line in codes]
    low_bytes = torch.tensor(np.array(lows, F)).to(x.dtype).view(torch.uint8).numpy().tobytes() if lows else b""
    return low_bytes + np.array(scales, "<u2").tobytes() + b"".join(packed)


def _encode_centred(spec, x, values):
    heads, tokens, dim = values.shape
    if not values.size:
        return b""
    top = F(min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max))
    means = torch.zeros(heads, dim, dtype=x.dtype)
    centred = values.copy()
    for h in range(heads):
        good = [bool(np.isfinite(values[h, t]).all()) for t in range(tokens)]
        for c in range(dim):
            found = mean([values[h, t, c] if good[t] else None for t in range(tokens)])
            means[h, c] = torch.tensor(min(max(found, -top), top)).to(x.dtype)
            middle = means[h, c].to(torch.float32).numpy()
            for t in range(tokens):
                if np.isfinite(values[h, t, c]):
                    far = np.finfo(F).max
                    centred[h, t, c] = min(max(values[h, t, c] - middle, -far), far)
    inner = spec.replace("cen", "had" if "g" in spec else "sym")
    return means.view(torch.uint8).numpy().tobytes() + _encode(inner, torch.from_numpy(centred), centred)
