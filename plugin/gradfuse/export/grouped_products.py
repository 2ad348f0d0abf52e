"""Products of groups of rows, each with a matrix of its own, as experts compute them: an ONNX Loop over the groups.

They are the bodies of what transformers computes where `torch.nn.functional.grouped_mm` lacks a kernel.
"""

from __future__ import annotations

# A Loop needs no number of rows that is known ahead. Rows behind the last group are zeros.
ROWS = """
GroupedRows (input, weight, ends) => (output) {
    none = Constant<value_ints=[0]>()
    number = Constant<value_float=0.0>()
    zero = CastLike(number, input)
    rows = Shape<start=0, end=1>(input)
    groups = Shape<start=0, end=1>(weight)
    columns = Shape<start=2, end=3>(weight)
    trips = Squeeze(groups)
    long_ends = Cast<to=7>(ends)
    empty_shape = Concat<axis=0>(none, columns)
    empty = Expand(zero, empty_shape)
    always = Constant<value=bool {1}>()
    last, found = Loop<body=group (int64 index, bool going, start, before) => (going_on, end, after) {
        going_on = Identity(going)
        first_axis = Constant<value_ints=[0]>()
        place = Unsqueeze(index, first_axis)
        end = Gather(long_ends, place)
        part = Slice(input, start, end, first_axis)
        matrix = Gather(weight, index)
        product = MatMul(part, matrix)
        after = Concat<axis=0>(before, product)
    }>(trips, always, none, empty)
    missing = Sub(rows, last)
    rest_shape = Concat<axis=0>(missing, columns)
    rest = Expand(zero, rest_shape)
    output = Concat<axis=0>(found, rest)
}
"""

# A row of zeros is added to each group, as runtimes differ in products of nothing.
INNER = """
GroupedInner (left, right, ends) => (output) {
    none = Constant<value_ints=[0]>()
    one = Constant<value_ints=[1]>()
    number = Constant<value_float=0.0>()
    zero = CastLike(number, left)
    height = Shape<start=0, end=1>(left)
    width = Shape<start=1, end=2>(right)
    groups = Shape<start=0, end=1>(ends)
    trips = Squeeze(groups)
    long_ends = Cast<to=7>(ends)
    column_shape = Concat<axis=0>(height, one)
    column = Expand(zero, column_shape)
    row_shape = Concat<axis=0>(one, width)
    row = Expand(zero, row_shape)
    always = Constant<value=bool {1}>()
    last, output = Loop<body=group (int64 index, bool going, start) => (going_on, end, product) {
        going_on = Identity(going)
        first_axis = Constant<value_ints=[0]>()
        second_axis = Constant<value_ints=[1]>()
        place = Unsqueeze(index, first_axis)
        end = Gather(long_ends, place)
        left_part = Slice(left, start, end, second_axis)
        right_part = Slice(right, start, end, first_axis)
        left_padded = Concat<axis=1>(left_part, column)
        right_padded = Concat<axis=0>(right_part, row)
        product = MatMul(left_padded, right_padded)
    }>(trips, always, none)
}
"""
