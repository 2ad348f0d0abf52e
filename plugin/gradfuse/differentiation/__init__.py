"""Gradients of ONNX models as ONNX nodes, by reverse-mode differentiation, without PyTorch.

`reverse` walks the graph backward. For each node on the way it asks `rules` for the operator's rule, a function that
writes the gradients of the node's inputs in terms of those of its outputs. The rules are in one file a family:
`elementwise`, `reductions`, `products`, `views`, `indexing`, `convolutions`, `pooling`, `normalization` and `losses`.
`tensors` is what they write with: arithmetic on values of a graph.
"""
