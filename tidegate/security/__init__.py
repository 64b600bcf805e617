"""A private certificate authority for a small fleet, and what its certificates say."""
