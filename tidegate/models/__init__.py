"""The model repository: folders with a manifest that says what a model takes, gives, costs and where it may run."""
