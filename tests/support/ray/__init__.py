"""A real Ray cluster on this machine, in a network of its own, with pools on Ray Serve and a gateway before them."""
