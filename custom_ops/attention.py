"""What the operators of scaled dot product attention have in common: masks, dropout and probabilities."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import TensorProto

from gradfuse.custom_ops import draws
from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    Attribute,
    Call,
    Dim,
    Input,
    Tensor,
    Variant,
    computed_type,
    type_string,
)

BIASES_HAVE_NO_GRADIENT = "There is no gradient w.r.t. attn_mask."
CONSTRAINTS = {
    "T": ALL_FLOAT_TYPES,
    "S": ("tensor(float)", "tensor(double)"),
    "M": ("tensor(bool)", *ALL_FLOAT_TYPES),
    "I": ("tensor(int64)",),
}
_FEWEST_MASK_DIMS = 2

ROW_INPUTS = (
    Input("query", "T", "Queries, (B, H, L, E)."),
    Input("key", "T", "Keys, (B, G, S, E); H is a multiple of G, and H / G heads of queries in a row share one."),
    Input("value", "T", "Values, (B, G, S, Ev)."),
)
OPTIONAL_INPUTS = (
    Input(
        "attn_mask",
        "M",
        "Boolean, True where a query sees a key, or of type T and added to the scores: the last 2 to 4 dimensions of "
        "(B, H, L, S), each in full or 1.",
        optional=True,
    ),
    Input("seed", "I", "Seed of the dropout, of one element. Needed where dropout_threshold is not 0.", optional=True),
    Input("drawn", "I", "What is added to draw, of one element. Absent: 0.", optional=True),
)
ATTRIBUTES = (
    Attribute("scale", 0.0, "Factor of the products of queries and keys; 0: 1 / sqrt(E)."),
    Attribute(
        "causal",
        0,
        "1: row l sees keys 0 to l, as ATen's is_causal. 2: row l sees keys 0 to l + S - L, so that the last row sees "
        "all. 0: every row sees all that attn_mask shows.",
    ),
    Attribute(
        "dropout_threshold",
        0,
        "Dropout: probabilities whose 31 random bits are less become 0, and others are divided by "
        "1 - dropout_threshold / 2^31.",
    ),
    Attribute("draw", 0, "Number of the draw of random bits in a step, as gradfuse's exported steps count them."),
)
CAUSAL = (0, 1, 2)
MOST_WITH_DIGITS = (2.0**13, 2.0**42)
"""Up to here neighbouring numbers are at most 1 / 1024 apart: in float, and in double."""
THRESHOLD_END = 2**31

SAMPLES = tuple(
    {"scale": scale, "causal": causal, "dropout_threshold": threshold}
    for scale in (0.0, 1.0)
    for causal in CAUSAL
    for threshold in (0, 1)
)
"""Attributes of nodes that between them have every text of the bodies without a mask."""


def sizes(call: Call) -> dict[str, Dim]:
    """The dimensions by their letters, as far as they are known.

    Raises:
        ArgumentError: the inputs or attributes contradict each other.
    """
    _check_attributes(call)
    found: dict[str, Dim] = {}
    named = {
        "query": ("B", "H", "L", "E"), "key": ("B", "G", "S", "E"), "value": ("B", "G", "S", "Ev"),
        "output": ("B", "H", "L", "Ev"), "grad_output": ("B", "H", "L", "Ev"), "logsumexp": ("B", "H", "L"),
    }  # fmt: skip
    for name, letters in named.items():
        for letter, dim in zip(letters, call.shape(name, *letters), strict=True):
            found[letter] = call.same(name, letter, found.get(letter), dim)
    heads, groups = found["H"], found["G"]
    if isinstance(heads, int) and isinstance(groups, int) and (heads % groups if groups else heads):
        raise call.error("query", f"of H {heads}", f"a multiple of key's G {groups}")
    _check_mask(call, found)
    _check_types(call)
    call.one_element("seed", "drawn")
    return found


def _check_attributes(call: Call) -> None:
    causal, threshold = call.attributes["causal"], call.attributes["dropout_threshold"]
    if causal not in CAUSAL:
        raise call.error("causal", causal, "0, 1 or 2")
    assert isinstance(threshold, int)
    if not 0 <= threshold < THRESHOLD_END:
        raise call.error("dropout_threshold", threshold, f"0 to {THRESHOLD_END - 1}")
    if threshold and "seed" not in call.inputs:
        raise call.error("seed", "absent", f"a tensor, as dropout_threshold is {threshold}")


def _check_mask(call: Call, found: dict[str, Dim]) -> None:
    mask = call.inputs["attn_mask"].shape if "attn_mask" in call.inputs else None
    if mask is None:
        return
    whole = ("B", "H", "L", "S")
    if not _FEWEST_MASK_DIMS <= len(mask) <= len(whole):
        raise call.error("attn_mask", f"of rank {len(mask)}", "rank 2 to 4")
    for letter, dim in zip(whole[-len(mask) :], mask, strict=True):
        wanted = found[letter]
        if isinstance(dim, int) and dim != 1 and isinstance(wanted, int) and dim != wanted:
            raise call.error("attn_mask", f"of {letter} {dim}", f"{letter} {wanted} or 1")


def _check_types(call: Call) -> None:
    dtype = _dtype(call)
    if dtype == TensorProto.UNDEFINED:
        return
    wanted = {"attn_mask": (TensorProto.BOOL, dtype), "logsumexp": (computed_type(dtype),)}
    for name, types in wanted.items():
        found = call.inputs[name].dtype if name in call.inputs else TensorProto.UNDEFINED
        if found not in (TensorProto.UNDEFINED, *types):
            names = " or ".join(map(type_string, types))
            raise call.error(name, type_string(found), f"{names}, as query is {type_string(dtype)}")


def _dtype(call: Call) -> int:
    known = (
        call.inputs[name].dtype for name in ("query", "key", "value", "output", "grad_output") if name in call.inputs
    )
    return next((dtype for dtype in known if dtype != TensorProto.UNDEFINED), TensorProto.UNDEFINED)


def choices(call: Call) -> Iterable[str]:
    """The words which decide the text of the bodies."""
    if _dtype(call) == TensorProto.DOUBLE:
        yield "double"
    if call.attributes["scale"] != 0:
        yield "scaled"
    if call.attributes["causal"]:
        yield f"causal{call.attributes['causal']}"
    if call.attributes["dropout_threshold"]:
        yield "dropout"
    if "attn_mask" in call.inputs:
        mask = call.inputs["attn_mask"].dtype
        if mask == TensorProto.UNDEFINED:
            raise call.error("attn_mask", "of a type that is not known", "one that the model declares")
        yield "shown" if mask == TensorProto.BOOL else "added"


def tensors(letters: str, dtype: int, found: dict[str, Dim]) -> Tensor:
    """An output of a type, of dimensions that are named by their letters."""
    return Tensor(dtype, tuple(found[letter] for letter in letters.split()))


def scores(variant: Variant) -> str:
    """Nodes that compute ``scores``, (B, H, L, S) and -inf where a row does not see a key, of query, key and masks.

    Where there is no key, one takes the place of all, whose elements are 0 as those of its value, ``v``: it adds 0 to
    every result. ``k`` and ``v`` are (B, G, S, *); ``by_group`` is the shape (B, G, H / G L) without its last
    dimension; heads of queries that share a head of keys are as one of more rows.
    """
    masks = ""
    seen = []
    if "attn_mask" in variant.inputs:
        masks += """
            mask_end = Shape<start=-1>(attn_mask)
            mask_rest = Shape<end=-1>(attn_mask)
            filled_mask_end = Min(mask_end, one)
            mask_missing = Sub(one, filled_mask_end)
            mask_filling_shape = Concat<axis=0>(mask_rest, mask_missing)
            mask_filling = ConstantOfShape(mask_filling_shape)
            typed_mask_filling = CastLike(mask_filling, attn_mask)
            mask = Concat<axis=-1>(attn_mask, typed_mask_filling)
        """
    if "added" in variant.choices:
        masks += """
            mask_numbers = Cast<to=$real>(mask)
            no_keys = Equal(keys, zero)
            zero_added = Cast<to=$real>(zero)
            real_mask = Where(no_keys, zero_added, mask_numbers)
            masked_scores = Add(all_scores, real_mask)
        """
    else:
        masks += "masked_scores = Identity(all_scores)\n"
        seen += ["mask"] if "shown" in variant.choices else []
    causal = next((word for word in variant.choices if word.startswith("causal")), "")
    if causal:
        masks += f"""
            first_number = Constant<value_int=0>()
            next_number = Constant<value_int=1>()
            query_number = Squeeze(queries)
            filled_key_number = Squeeze(filled_keys)
            row_line = Range(first_number, query_number, next_number)
            key_line = Range(first_number, filled_key_number, next_number)
            row_column = Unsqueeze(row_line, one)
            ahead = {"Sub(keys, queries)" if causal == "causal2" else "Identity(zero)"}
            last_seen = Add(row_column, ahead)
            triangle = GreaterOrEqual(last_seen, key_line)
        """
        seen += ["triangle"]
    if len(seen) == 2:
        masks += "seen = And(mask, triangle)\n"
        seen = ["seen"]
    masks += f"scores = Where({seen[0]}, masked_scores, never)" if seen else "scores = Identity(masked_scores)"
    scale = "wanted_scale = Constant<value_float: float = @scale>()\n scale = Cast<to=$real>(wanted_scale)"
    if "scaled" not in variant.choices:
        scale = """
            width = Max(query_width, one)
            real_width = Cast<to=$real>(width)
            root = Sqrt(real_width)
            scale = Reciprocal(root)
        """
    return f"""
        zero = Constant<value_ints=[0]>()
        one = Constant<value_ints=[1]>()
        never_float = Constant<value_float=-inf>()
        never = Cast<to=$real>(never_float)
        batch = Shape<start=0, end=1>(query)
        heads = Shape<start=1, end=2>(query)
        queries = Shape<start=2, end=3>(query)
        query_width = Shape<start=3, end=4>(query)
        groups = Shape<start=1, end=2>(key)
        keys = Shape<start=2, end=3>(key)
        value_width = Shape<start=3, end=4>(value)
        filled_keys = Max(keys, one)
        missing = Sub(filled_keys, keys)
        by_group = Concat<axis=0>(batch, groups)
        row_count = Mul(heads, queries)
        some_groups = Max(groups, one)
        group_rows = Div(row_count, some_groups)
        key_filling_shape = Concat<axis=0>(by_group, missing, query_width)
        value_filling_shape = Concat<axis=0>(by_group, missing, value_width)
        key_filling = ConstantOfShape(key_filling_shape)
        value_filling = ConstantOfShape(value_filling_shape)
        real_key_filling = Cast<to=$real>(key_filling)
        real_value_filling = Cast<to=$real>(value_filling)
        real_query = Cast<to=$real>(query)
        real_key = Cast<to=$real>(key)
        real_value = Cast<to=$real>(value)
        query_shape = Concat<axis=0>(by_group, group_rows, query_width)
        q = Reshape<allowzero=1>(real_query, query_shape)
        k = Concat<axis=2>(real_key, real_key_filling)
        v = Concat<axis=2>(real_value, real_value_filling)
        {scale}
        k_turned = Transpose<perm=[0, 1, 3, 2]>(k)
        products = MatMul(q, k_turned)
        scaled_products = Mul(products, scale)
        whole_shape = Concat<axis=0>(batch, heads, queries, filled_keys)
        rows_shape = Concat<axis=0>(by_group, group_rows, filled_keys)
        all_scores = Reshape<allowzero=1>(scaled_products, whole_shape)
        {masks}
    """


def dropped(variant: Variant, source: str, result: str) -> str:
    """Nodes that multiply numbers for all probabilities by what the dropout makes of 1: 0 or more than 1."""
    if "dropout" not in variant.choices:
        return f"{result} = Identity({source})\n"
    return f"""
        {draws.hash_kept("scores", variant.inputs, variant.opset)}
        drawn_range = Constant<value_float={float(THRESHOLD_END)}>()
        real_range = Cast<to=$real>(drawn_range)
        real_limit = Cast<to=$real>(hash_limit)
        kept_range = Sub(real_range, real_limit)
        gain = Div(real_range, kept_range)
        dropped_to = Sub(real_range, real_range)
        gains = Where(hash_kept, gain, dropped_to)
        {result} = Mul({source}, gains)
    """
