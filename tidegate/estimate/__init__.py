"""Pure estimators: what a thing costs, how long a link takes, how far a prediction may be off."""
