"""Encoders over packed rows: BERT as this project computes it, without padding, on processors and GPUs.

`torch_packed.py` is the engine that `load_engine` makes for `torch-packed`, and the one module that others import, with
`bert.Architecture` for the tool that writes such files. Attention is chosen by device and precision: a kernel of our
own, torch's over rectangles, or flash attention over rows. Engines for models of any kind belong one room above.
"""
