"""Evidence of what a target is: how it is made, sent and verified."""
