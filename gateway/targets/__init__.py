"""Ways to reach a target; all of them look the same from the conductor."""
