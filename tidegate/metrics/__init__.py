"""What all processes' metrics are made of: counting, families, bounds, sharing and the ways out."""
