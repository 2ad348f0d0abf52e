"""Making the fixed batch of a model dynamic.

`layouts` says where the batch is in a value, `analysis` follows it through a graph by the rules of `sizes`, `views` and
`operators`, `rewriting` changes the nodes that have fixed it, and `freeing` has the public function.
"""
