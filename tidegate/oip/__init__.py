"""Open Inference Protocol v2: wire ⇄ types, pure codecs first, servers over them."""
