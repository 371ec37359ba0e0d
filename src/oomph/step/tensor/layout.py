"""Shapes and strides: which views exist, and how PyTorch lays out a result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Shape = tuple[int, ...]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
HALVES = ("bfloat16", "float16")
_RANK = {
    "bool": 0,
    "uint8": 1,
    "int8": 1,
    "int32": 2,
    "int64": 3,
    "float16": 4,
    "bfloat16": 4,
    "float32": 5,
    "float64": 6,
}


def numel(shape: Sequence[int]) -> int:
    """The number of elements in a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    step = 1
    for place in range(len(shape) - 1, -1, -1):
        strides[place] = step
        step *= max(shape[place], 1)
    return tuple(strides)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    step = 1
    for place in range(len(shape) - 1, -1, -1):
        if shape[place] != 1:
            if strides[place] != step:
                return False
            step *= shape[place]
    return True


@lru_cache(maxsize=1024)  # a model repeats a few layouts in every block
def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the elements fill one range of memory, in any order of dimensions (non-overlapping and dense)."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def dense_strides_like(shape: Shape, strides: Shape) -> Shape:
    """Strides of `empty_like`: the order of dimensions is kept if the tensor is dense; otherwise contiguous."""
    return strides if is_dense(shape, strides) else result_layout(((shape, strides),))[1]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape of an elementwise result."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple([max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)])


def promote(dtypes: Sequence[str]) -> str:
    """The common dtype of these."""
    best = max(dtypes, key=_RANK.__getitem__)
    if best in HALVES and len(set(dtypes) & set(HALVES)) == 2:
        return "float32"
    return best


@lru_cache(maxsize=1024)
def result_layout(operands: tuple[tuple[Shape, Shape], ...]) -> tuple[Shape, Shape]:
    """Shape and strides of an elementwise result: dimensions in the operands' order, as TensorIterator sorts them."""
    shape = broadcast([shape for shape, _ in operands])
    first = operands[0]
    if all(operand[0] == shape and operand[1] == first[1] for operand in operands) and is_dense(*first):
        return shape, first[1]
    rank = len(shape)
    if all(operand[0] == shape and is_contiguous(*operand) for operand in operands):
        return shape, contiguous_strides(shape)
    padded: list[list[int]] = []
    for sizes, strides in operands:
        missing = rank - len(sizes)
        own = [0 if sizes[i] == 1 and shape[i + missing] != 1 else strides[i] for i in range(len(sizes))]
        padded.append([0] * missing + own)
    order = list(range(rank))[::-1]  # innermost first
    for index in range(1, rank):
        moving = index
        for other in range(index - 1, -1, -1):
            compared = _compare(padded, shape, order[other], order[moving])
            if compared > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif compared < 0:
                break
    out, step = [0] * rank, 1
    for dimension in order:
        out[dimension] = step
        step *= shape[dimension]
    return shape, tuple(out)


def _compare(strides: list[list[int]], shape: Shape, first: int, second: int) -> int:
    """TensorIterator's `should_swap`: positive if the first dimension belongs outside the second."""
    for own in strides:
        a, b = own[first], own[second]
        if a == 0 or b == 0:
            continue
        if a < b:
            return -1
        if a > b:
            return 1
        if shape[first] > shape[second]:
            return 1
    return 0


def viewed(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """The strides that give the same memory another shape; None if it must be copied (computeStride)."""
    if is_contiguous(shape, strides):
        return contiguous_strides(new)
    if numel(shape) == 0:
        return contiguous_strides(new)
    result = [0] * len(new)
    place = len(new) - 1
    base = strides[-1]
    chunk = chunk_new = 1
    for index in range(len(shape) - 1, -1, -1):
        chunk *= shape[index]
        if index == 0 or (shape[index - 1] != 1 and strides[index - 1] != chunk * base):
            while place >= 0 and (chunk_new < chunk or new[place] == 1):
                result[place] = chunk_new * base
                chunk_new *= new[place]
                place -= 1
            if chunk_new != chunk:
                return None
            if index > 0:
                base = strides[index - 1]
                chunk = chunk_new = 1
    return tuple(result) if place == -1 else None
