"""The operator's side of shipping models: what `tidegate model push`, `rollout` and `status` are made of."""
