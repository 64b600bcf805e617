"""Cutting a model between layers: where its graph may be cut, how the tensor between the halves travels, and the build.

`graph_cut.py` finds cuts and makes the halves, `activation_codec.py` adds the nodes that compress, `layer_splitter.py`
measures and writes all into the repository, and `cli.py` is `tidegate model split-layers`.
"""
